"""RULER MV-NIAH: four values of one key in prose, all asked for (arXiv 2404.06654)."""

from __future__ import annotations

from pathlib import Path

from mcretrofit.tasks import Sample
from mcretrofit.tasks._fit import no_depth
from mcretrofit.tasks._niah import Request
from mcretrofit.tasks._niah_many import Shape, hide_many
from mcretrofit.tasks._score import string_match_all as score
from mcretrofit.tokenizer import Tokenizer

__all__ = ["METRIC", "samples", "score"]

METRIC = "accuracy"
SHAPE = Shape("niah_multivalue", values=4)


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
    """`count` prompts of at most `length` tokens; depths are drawn, there is no single needle."""
    no_depth(SHAPE.task, depth)
    return hide_many(SHAPE, Request(length, depth, count, seed, tokenizer, template, haystack))
