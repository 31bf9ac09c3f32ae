"""RULER MK-NIAH-1: four word keys in prose, one asked for (arXiv 2404.06654)."""

from __future__ import annotations

from pathlib import Path

from mcretrofit.tasks import Sample
from mcretrofit.tasks._niah import Request
from mcretrofit.tasks._niah_many import Shape, hide_many
from mcretrofit.tasks._score import string_match_all as score
from mcretrofit.tokenizer import Tokenizer

__all__ = ["METRIC", "samples", "score"]

METRIC = "accuracy"
SHAPE = Shape("niah_multikey_1", keys=4)


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
    """`count` prompts of at most `length` tokens; a depth is that of the needle asked for."""
    return hide_many(SHAPE, Request(length, depth, count, seed, tokenizer, template, haystack))
