"""Retrieval from SQuAD contexts, --data FILE (1606.05250, 2402.18668).

--data: JSON or JSONL of {context, question, answers} (`_retrieval.py` has the schema), or SQuAD's
and XQuAD's own {data: [{paragraphs: [{context, qas: [{question, answers: [{text, answer_start}]}]}]}]}.
Questions without an answer (SQuAD 2) are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mcretrofit.tasks import Sample
from mcretrofit.tasks._data import Record
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
    return retrieve("squad", request, _items)


def _items(records: list[Record]) -> Iterable[Item]:
    if "data" not in records[0].fields:
        yield from plain(records)
        return
    for article in records[0].objects("data"):
        for paragraph in article.objects("paragraphs"):
            context = paragraph.get("context")
            for asked in paragraph.objects("qas"):
                right = asked.objects("answers")
                if right:
                    texts = tuple(one.get("text") for one in right)
                    yield Item(
                        context, asked.get("question"), texts, right[0].get("answer_start", int)
                    )
