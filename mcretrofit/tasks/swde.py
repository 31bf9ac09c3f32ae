"""Retrieval from web pages by attribute (SWDE), --data FILE (2304.09433, 2402.18668).

--data: JSON or JSONL of {context, question, answers} (`_retrieval.py` has the schema), or the
cloze set's own {text, key, value}: the page, an attribute's name and its value; the page ends where
a `Summary of information above...` begins.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mcretrofit.tasks import Sample
from mcretrofit.tasks._retrieval import Request, keyed, retrieve
from mcretrofit.tasks._retrieval import contains as score
from mcretrofit.tokenizer import Tokenizer

__all__ = ["METRIC", "samples", "score"]

METRIC = "accuracy"
MARKS = ("Summary of information above...",)


def samples(
    *,
    length: int,
    depth: float | None = None,
    count: int,
    seed: int,
    tokenizer: Tokenizer,
    template: str | Path = "ruler",
    haystack: str | Path | None = None,
    data: str | Path | None = None,
) -> list[Sample]:
    """`count` prompts of at most `length` tokens, the context cut around the answer."""
    request = Request(length, depth, count, seed, tokenizer, template, haystack, data)
    return retrieve("swde", request, partial(keyed, marks=MARKS))
