"""Retrieval from DROP passages with their answer, --data FILE (1903.00161, 2402.18668).

--data: JSON or JSONL of {context, question, answers} (`_retrieval.py` has the schema), or DROP's
own {id: {passage, qa_pairs: [{question, answer: {spans, number, date}}]}}. Any of the spans is right;
answers that have to be computed stand in no passage and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mcretrofit.tasks import Sample
from mcretrofit.tasks._data import Record, as_record
from mcretrofit.tasks._retrieval import Item, Request, plain, retrieve
from mcretrofit.tasks._retrieval import contains as score
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
    data: str | Path | None = None,
) -> list[Sample]:
    """`count` prompts of at most `length` tokens, the context cut around the answer."""
    request = Request(length, depth, count, seed, tokenizer, template, haystack, data)
    return retrieve("drop", request, _items)


def _items(records: list[Record]) -> Iterable[Item]:
    first = records[0].fields
    if "context" in first or not all(isinstance(one, dict) for one in first.values()):
        yield from plain(records)
        return
    for name, value in first.items():
        passage = as_record(value, f"{records[0].where}, {name}")
        for asked in passage.objects("qa_pairs"):
            yield Item(passage.get("passage"), asked.get("question"), _answers(asked))


def _answers(asked: Record) -> tuple[str, ...]:
    answer = as_record(asked.get("answer", dict), f"{asked.where}, answer")
    if answer.get("spans", list):
        return answer.texts("spans")
    date = as_record(answer.fields.get("date") or {}, f"{answer.where}, date")
    parts = [str(date.fields.get(part) or "") for part in ("day", "month", "year")]
    return (str(answer.fields.get("number") or ""), " ".join(part for part in parts if part))
