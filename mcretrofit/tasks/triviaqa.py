"""Retrieval from TriviaQA's evidence documents, --data FILE (1705.03551, 2402.18668).

--data: JSON or JSONL of {context, question, answers} (`_retrieval.py` has the schema), or
TriviaQA's own {Data: [{Question, Answer: {Value, Aliases}, EntityPages, SearchResults}], Domain} with
its `evidence` folder beside the folder of the file: each document that holds an answer is a sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mcretrofit.errors import RetrofitError
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
    return retrieve("triviaqa", request, _items)


def _items(records: list[Record]) -> Iterable[Item]:
    if "Data" not in records[0].fields:
        for item in plain(records):
            # start is that of the text with its marks
            yield item._replace(context=_clean(item.context), start=None)
        return
    file = Path(records[0].where)
    for asked in records[0].objects("Data"):
        answer = as_record(asked.get("Answer", dict), f"{asked.where}, Answer")
        right = (answer.get("Value"), *answer.fields.get("Aliases", ()))
        for field, folder in (("EntityPages", "wikipedia"), ("SearchResults", "web")):
            for page in asked.objects(field) if field in asked.fields else ():
                place = file.parent.parent / "evidence" / folder / page.get("Filename")
                yield Item(_clean(_read(place, page)), asked.get("Question"), right)


def _clean(text: str) -> str:
    return re.sub(r"\[(PAR|DOC|TLE)\]", "", text)


def _read(place: Path, page: Record) -> str:
    try:
        return place.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RetrofitError(
            f"{page.where}: field 'Filename' names {place}, which cannot be read: put TriviaQA's "
            "evidence folder beside the folder of the file"
        ) from error
