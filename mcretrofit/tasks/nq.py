"""Retrieval from Natural Questions pages, --data FILE (Kwiatkowski et al. 2019, 2402.18668).

--data: JSON or JSONL of {context, question, answers} (`_retrieval.py` has the schema), or the
simplified set's own {document_text, question_text, annotations: [{short_answers: [{start_token,
end_token}]}]}; tags are dropped and questions without a short answer are left out.
"""

from __future__ import annotations

import re
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
    return retrieve("nq", request, _items)


def _items(records: list[Record]) -> Iterable[Item]:
    if "document_text" not in records[0].fields:
        yield from plain(records)
        return
    for record in records:
        words = record.get("document_text").split(" ")
        spans = [
            words[span.get("start_token", int) : span.get("end_token", int)]
            for annotation in record.objects("annotations")
            for span in annotation.objects("short_answers")
        ]
        if spans:
            right = tuple(_text(span) for span in spans)
            yield Item(_text(words), f"{record.get('question_text').rstrip('?')}?", right)


def _text(words: list[str]) -> str:
    return " ".join(word for word in words if not re.fullmatch(r"<[^>]+>", word))
