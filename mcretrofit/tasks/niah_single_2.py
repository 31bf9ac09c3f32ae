"""RULER S-NIAH-2: prose haystack, word key, 7-digit value (arXiv 2404.06654)."""

from __future__ import annotations

from pathlib import Path

from mcretrofit.tasks import Sample
from mcretrofit.tasks._niah import Request, hide
from mcretrofit.tasks._score import string_match_all as score
from mcretrofit.tokenizer import Tokenizer

__all__ = ["METRIC", "samples", "score"]

METRIC = "accuracy"


def samples(
    *,
    length: int,
    depth: float | None = None,
    count: int,
    seed: int,
    tokenizer: Tokenizer,
    template: str | Path = "ruler",
    haystack: str | Path | None = None,
) -> list[Sample]:
    """`count` prompts of at most `length` tokens; depth None draws it anew for each."""
    request = Request(length, depth, count, seed, tokenizer, template, haystack)
    return hide("niah_single_2", haystack="essay", values="numbers", request=request)
