"""Multi-query associative recall: key-value lines in prose, then every key again (2312.04927)."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import NamedTuple

from mcretrofit.errors import UsageError
from mcretrofit.tasks import Sample
from mcretrofit.tasks._fit import (
    check_request,
    check_room,
    check_spelling,
    largest,
    no_depth,
    stream,
)
from mcretrofit.tasks._haystack import NOISE, Essay, essay, read_text
from mcretrofit.tasks._mqar_ids import mqar_ids
from mcretrofit.tasks._recall import compact_keys, pair_line, pair_stem
from mcretrofit.tasks._score import string_match_all as score
from mcretrofit.tasks._templates import fixed_wording
from mcretrofit.tokenizer import Tokenizer

__all__ = ["METRIC", "mqar_ids", "samples", "score"]

METRIC = "accuracy"

# the pairs lie in the first part of the context: the last one is not next to its query
SPREAD = 0.85


class Facts(NamedTuple):
    """The pairs of one sample, which of them are asked, and its prose."""

    pairs: tuple[tuple[str, str], ...]
    asked: tuple[tuple[str, str], ...]
    prose: str


def samples(
    *,
    length: int,
    depth: float | None = None,
    count: int,
    seed: int,
    tokenizer: Tokenizer,
    template: str | Path = "ruler",
    haystack: str | Path | None = None,
    pairs: int = 4,
    queries: int | None = None,
) -> list[Sample]:
    """`count` teacher-forced samples of at most `length` tokens over all their pieces.

    The prompt holds the true answers, so one forward pass scores every query: `pieces` says which
    tokens are answers (each starts with its space), `queries` where the values are. `queries`
    None asks for all pairs, at most 8.
    """
    check_request("mqar", length=length, depth=None, count=count)
    no_depth("mqar", depth)
    fixed_wording("mqar", template)
    asked = min(pairs, 8) if queries is None else queries
    if not 1 <= asked <= pairs <= 900:
        raise UsageError(
            f"mqar: {asked} queries of {pairs} pairs; needed is 1 <= queries <= pairs <= 900"
        )
    named = None if haystack == "essay" else haystack
    source = essay(NOISE if named == "noise" else read_text(named))
    facts = [_facts(stream("mqar", seed, i), source, pairs, asked) for i in range(count)]
    for key, value in {pair for fact in facts for pair in fact.pairs}:
        check_spelling("mqar", tokenizer, pair_line(key, value))
    check_room("mqar", max(_cost(tokenizer, fact, 0) for fact in facts), length)
    return [_sample(tokenizer, fact, length, seed) for fact in facts]


def _facts(rng: Random, source: Essay, pairs: int, asked: int) -> Facts:
    keys = compact_keys(rng, pairs)
    # distinct, or a wrong pair could answer right
    values = [str(value) for value in rng.sample(range(100, 1000), pairs)]
    made = tuple(zip(keys, values, strict=True))
    start = rng.choice(source.starts)
    turned = (*source.words[start:], *source.words[:start])
    return Facts(made, tuple(rng.sample(made, asked)), " ".join(turned) + " ")


def _context(facts: Facts, size: int) -> str:
    """`size` characters of prose, broken between words by one line for each pair."""
    text = (facts.prose * (size // len(facts.prose) + 1))[:size]
    blocks, last = [], 0
    for index, (key, value) in enumerate(facts.pairs):
        place = int(size * SPREAD * (index + 0.5) / len(facts.pairs))
        at = text.rfind(" ", 0, place) + 1
        blocks += [text[last:at].strip(), pair_line(key, value)]
        last = max(last, at)
    return "\n".join(block for block in (*blocks, text[last:].strip()) if block)


def _pieces(facts: Facts, size: int) -> list[tuple[str, bool]]:
    pieces = [(_context(facts, size), False)]
    for key, value in facts.asked:
        pieces += [(f"\n{pair_stem(key)}", False), (f" {value}", True)]
    return [*pieces, ("\n", False)]


def _cost(tokenizer: Tokenizer, facts: Facts, size: int) -> int:
    return sum(len(tokenizer.encode(text)) for text, _ in _pieces(facts, size))


def _sample(tokenizer: Tokenizer, facts: Facts, length: int, seed: int) -> Sample:
    size = largest(partial(_cost, tokenizer, facts), length, 0)
    pieces = _pieces(facts, size)
    ends = list(accumulate(len(text) for text, _ in pieces))
    first = pair_line(*facts.pairs[0])
    prompt = "".join(text for text, _ in pieces)
    at = f"\n{prompt}".index(f"\n{first}\n")
    return Sample(
        prompt=prompt,
        answers=tuple(value for _, value in facts.asked),
        tokens=_cost(tokenizer, facts, size),
        max_new_tokens=0,
        depth=None,
        seed=seed,
        dialect="pairs",
        needle_span=(at, at + len(first)),
        pieces=tuple(pieces),
        queries=tuple(
            (end - len(text) + 1, text[1:])
            for end, (text, is_answer) in zip(ends, pieces, strict=True)
            if is_answer
        ),
    )
