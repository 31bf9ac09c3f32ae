"""How completions are scored: RULER's `string_match_all` (arXiv 2404.06654)."""

from __future__ import annotations

from mcretrofit.tasks import Sample


def string_match_all(sample: Sample, completion: str) -> float:
    """Share of the answers found in the completion as case-insensitive substrings."""
    text = completion.lower()
    return sum(answer.lower() in text for answer in sample.answers) / len(sample.answers)
