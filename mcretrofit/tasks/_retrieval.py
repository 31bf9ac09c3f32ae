"""In-context retrieval in its cloze form (2402.18668): text around an answer, the question last.

Records are JSON or JSON lines with
- `context`: the text; `question`: a cloze to continue, or a question that ends in `?`;
- `answers`: a list of texts, any of which is right, or one text as `answer` or `value`;
- `answer_start` (optional): the character of the context where the answer stands.
A context that does not hold its answer is left out: nothing could be read from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.tasks import Sample
from mcretrofit.tasks._data import Record, read_records, some
from mcretrofit.tasks._fit import check_request, check_room, check_spelling, largest, stream
from mcretrofit.tasks._templates import fixed_wording
from mcretrofit.tokenizer import Tokenizer

MAX_NEW_TOKENS = 48
SCHEMA = "objects with context, question and answers"


class Request(NamedTuple):
    """What a caller asks of every task, with the user's file."""

    length: int
    depth: float | None
    count: int
    seed: int
    tokenizer: Tokenizer
    template: str | Path
    haystack: str | Path | None
    data: str | Path | None


class Item(NamedTuple):
    """One question about a context; `start` None looks for the answer."""

    context: str
    question: str
    answers: tuple[str, ...]
    start: int | None = None


class Placed(NamedTuple):
    """An item whose answer stands at characters `start` to `end` of its context."""

    item: Item
    start: int
    end: int
    tail: str  # the question with its wording
    dialect: str


def retrieve(
    task: str, request: Request, items: Callable[[list[Record]], Iterable[Item]] | None = None
) -> list[Sample]:
    """Samples of a file; `items` reads a set's own format, else the schema above.

    A depth in percent says how much of the kept context stands before the answer (50 unless said).
    """
    check_request(task, length=request.length, depth=request.depth, count=request.count)
    fixed_wording(task, request.template)
    if request.haystack is not None:
        raise UsageError(f"{task} reads its contexts from --data and takes no haystack")
    records = read_records(task, request.data, SCHEMA)
    found = [one for one in map(_placed, (items or plain)(records)) if one is not None]
    if not found:
        raise RetrofitError(f"{task}: {request.data} has no context that holds its answer")
    asks = any(one.item.question.rstrip().endswith("?") for one in found)
    found = [
        _worded(one, asks) for one in some(found, request.count, stream(task, request.seed, 0))
    ]
    for one in found:
        check_spelling(task, request.tokenizer, one.item.context[one.start : one.end])
    least = [_cost(request, one, one.end - one.start) for one in found]
    check_room(task, max(least), request.length)
    return [_sample(task, request, one) for one in found]


def contains(sample: Sample, completion: str) -> float:
    """1 where the first line of the completion contains an answer, whatever the case."""
    line = completion.split("\n", 1)[0].lower()
    return float(any(answer.lower() in line for answer in sample.answers))


def plain(records: list[Record]) -> Iterable[Item]:
    """Items of the documented schema."""
    for record in records:
        start = record.get("answer_start", int) if "answer_start" in record.fields else None
        yield Item(record.get("context"), record.get("question"), answers(record), start)


def answers(record: Record) -> tuple[str, ...]:
    """The texts of `answers`, or the one of `answer` or `value`."""
    for name in ("answer", "value"):
        if name in record.fields and "answers" not in record.fields:
            return (record.get(name),)
    return record.texts("answers")


def keyed(records: list[Record], marks: tuple[str, ...] = ()) -> Iterable[Item]:
    """Items of {text, key, value}: the page, then the attribute's name; `marks` cut the page."""
    if "text" not in records[0].fields:
        yield from plain(records)
        return
    for record in records:
        text, key = record.get("text"), record.get("key").strip()
        if not key:
            raise RetrofitError(f"{record.where}: field 'key' is empty")
        for mark in marks:
            text = text.split(mark, 1)[0]
        text = text.rstrip()
        while text.lower().endswith(f"{key.lower()}:"):
            text = text[: -len(key) - 1].rstrip()
        yield Item(text, f"{key[0].upper()}{key[1:]}:", (record.get("value").strip(),))


def _placed(item: Item) -> Placed | None:
    right = tuple(dict.fromkeys(a.strip() for a in item.answers if a.strip()))
    item = item._replace(answers=right)
    for answer in right:
        start = item.start
        if start is not None and item.context[start : start + len(answer)] == answer:
            return Placed(item, start, start + len(answer), "", "")
        # whole words: 3 does not stand in "week 13"
        found = re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", item.context, re.IGNORECASE)
        if found:
            return Placed(item, found.start(), found.end(), "", "")
    return None


def _worded(one: Placed, asks: bool) -> Placed:
    question = one.item.question.strip()
    if asks:
        return one._replace(tail=f"\nQuestion: {question}\nAnswer:", dialect="question")
    return one._replace(tail=f" {question}", dialect="cloze")


def _window(one: Placed, size: int, depth: float) -> tuple[str, int]:
    """About `size` characters of the context around the answer, whole words; where it starts."""
    text, least = one.item.context, one.end - one.start
    before = int(max(size - least, 0) * depth / 100)
    begin = max(one.start - before, 0)
    end = min(max(begin + size, one.end), len(text))
    begin = max(min(begin, end - size), 0)
    if begin > 0 and not text[begin - 1].isspace():
        begin = min(text.find(" ", begin, one.start) + 1 or one.start, one.start)
    while begin < one.start and text[begin].isspace():
        begin += 1
    if end < len(text) and not text[end].isspace():
        end = max(text.rfind(" ", one.end, end), one.end)
    return text[begin:end], begin


def _prompt(one: Placed, size: int, depth: float | None) -> tuple[str, int]:
    text, begin = _window(one, size, 50.0 if depth is None else depth)
    head = text.rstrip()
    stop = "." if one.dialect == "cloze" and head[-1:] not in ".!?" else ""
    return f"{head}{stop}{one.tail}", begin


def _cost(request: Request, one: Placed, size: int) -> int:
    prompt, _ = _prompt(one, size, request.depth)
    return len(request.tokenizer.encode(prompt)) + MAX_NEW_TOKENS


def _sample(task: str, request: Request, one: Placed) -> Sample:
    size, least = len(one.item.context), one.end - one.start
    if _cost(request, one, size) > request.length:
        size = largest(partial(_cost, request, one), request.length, least)
    prompt, begin = _prompt(one, size, request.depth)
    return Sample(
        prompt=prompt,
        answers=one.item.answers,
        tokens=len(request.tokenizer.encode(prompt)) + MAX_NEW_TOKENS,
        max_new_tokens=MAX_NEW_TOKENS,
        depth=request.depth,
        seed=request.seed,
        dialect=one.dialect,
        dataset=task,
        needle_span=(one.start - begin, one.end - begin),
        question=len(prompt) - len(one.tail),
    )
