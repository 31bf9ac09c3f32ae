"""LAMBADA: the last word of a passage, greedily, --data FILE (arXiv 1606.06031).

--data: JSON or JSONL of {text}: a passage whose last word is asked for.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.tasks import Sample
from mcretrofit.tasks._data import Record, read_records, some
from mcretrofit.tasks._fit import (
    check_request,
    check_room,
    check_spelling,
    largest,
    no_depth,
    stream,
)
from mcretrofit.tasks._score import string_match_all as score
from mcretrofit.tasks._templates import fixed_wording
from mcretrofit.tokenizer import Tokenizer

__all__ = ["METRIC", "samples", "score"]

METRIC = "accuracy"


class Passage(NamedTuple):
    """A text without its last word, and that word."""

    context: str
    word: str


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
    """`count` teacher-forced samples; a passage of more than `length` tokens loses its beginning."""
    check_request("lambada", length=length, depth=None, count=count)
    no_depth("lambada", depth)
    fixed_wording("lambada", template)
    if haystack is not None:
        raise UsageError("lambada reads its passages from --data and takes no haystack")
    passages = [_passage(one) for one in read_records("lambada", data, "objects with text")]
    chosen = some(passages, count, stream("lambada", seed, 0))
    for one in chosen:
        check_spelling("lambada", tokenizer, f" {one.word}")
    check_room("lambada", max(_cost(tokenizer, one, 1) for one in chosen), length)
    return [_sample(tokenizer, one, length, seed) for one in chosen]


def _passage(record: Record) -> Passage:
    parts = record.get("text").rstrip().rsplit(None, 1)
    if len(parts) < 2:
        raise RetrofitError(f"{record.where}: field 'text' has no word before its last one")
    return Passage(*parts)


def _cost(tokenizer: Tokenizer, one: Passage, size: int) -> int:
    """Tokens of the last `size` characters of the context and of the word."""
    return sum(len(tokenizer.encode(text)) for text in (one.context[-size:], f" {one.word}"))


def _sample(tokenizer: Tokenizer, one: Passage, length: int, seed: int) -> Sample:
    size = len(one.context)
    if _cost(tokenizer, one, size) > length:
        size = largest(partial(_cost, tokenizer, one), length, 1)
    context = one.context[-size:]
    return Sample(
        prompt=f"{context} {one.word}",
        answers=(one.word,),
        tokens=_cost(tokenizer, one, size),
        max_new_tokens=0,
        depth=None,
        seed=seed,
        dialect="last word",
        dataset="lambada",
        pieces=((context, False), (f" {one.word}", True)),
        queries=((len(context) + 1, one.word),),
    )
