"""The user's data files: JSON or JSON lines, read with errors that name the line and the field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar

from mcretrofit.errors import RetrofitError, UsageError

Item = TypeVar("Item")
_KINDS = {str: "a text", int: "a whole number", list: "a list", dict: "an object"}


class Record(NamedTuple):
    """One object of a file, and where it stands: `file.jsonl, line 3`."""

    where: str
    fields: dict[str, Any]

    def get(self, name: str, kind: type = str) -> Any:
        """The field of that kind; an error says which line and which field."""
        if name not in self.fields:
            there = ", ".join(map(repr, self.fields)) or "none"
            raise RetrofitError(f"{self.where}: field {name!r} is missing (there are: {there})")
        value = self.fields[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise RetrofitError(f"{self.where}: field {name!r} is not {_KINDS[kind]}")
        return value

    def objects(self, name: str) -> list[Record]:
        """The objects of a field that is a list of them."""
        return [
            as_record(one, f"{self.where}, {name}[{index}]")
            for index, one in enumerate(self.get(name, list))
        ]

    def texts(self, name: str) -> tuple[str, ...]:
        """The texts of a field that is a list of them, at least one."""
        values = self.get(name, list)
        if not values or not all(isinstance(value, str) for value in values):
            raise RetrofitError(f"{self.where}: field {name!r} is not a list of texts")
        return tuple(values)


def as_record(value: Any, where: str) -> Record:
    if not isinstance(value, dict):
        raise RetrofitError(f"{where}: expected an object with fields, found {_name(value)}")
    return Record(where, value)


def read_records(task: str, data: str | Path | None, schema: str) -> list[Record]:
    """The objects of a file: one a line, those of a list, or a single one.

    Raises `UsageError` where no file is named, `RetrofitError` where it cannot be used.
    """
    if data is None:
        raise UsageError(
            f"{task} reads a file of yours: give --data FILE, JSON or JSONL of {schema}"
        )
    path = Path(data)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise RetrofitError(f"{task}: {path} cannot be read: {reason.lower()}") from error
    records = _lines(path, text) if _is_lines(path, text) else _whole(path, text)
    if not records:
        raise RetrofitError(f"{task}: {path} holds no records")
    return records


def some(items: Sequence[Item], count: int, rng: Random) -> list[Item]:
    """`count` of the items in random order, or all where there are fewer."""
    return rng.sample(items, min(count, len(items)))


def _is_lines(path: Path, text: str) -> bool:
    if path.suffix in (".jsonl", ".ndjson"):
        return True
    # a line that is an object of its own, with more behind it
    head, _, rest = text.strip().partition("\n")
    return head.startswith("{") and head.rstrip().endswith("}") and bool(rest.strip())


def _lines(path: Path, text: str) -> list[Record]:
    # not splitlines: a text may hold a bare separator such as U+2028
    lines = enumerate(text.split("\n"), 1)
    return [
        as_record(_parsed(line, f"{path}, line {number}"), f"{path}, line {number}")
        for number, line in lines
        if line.strip()
    ]


def _whole(path: Path, text: str) -> list[Record]:
    value = _parsed(text, str(path))
    if not isinstance(value, list):
        return [as_record(value, str(path))]
    return [as_record(one, f"{path}, record {at}") for at, one in enumerate(value, 1)]


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise RetrofitError(f"{where}: not a record (its brackets are nested too deep)") from error
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if "line" not in where else ""
        raise RetrofitError(
            f"{where}{line}: not JSON ({error.msg.lower()} at character {error.colno})"
        ) from error


def _name(value: Any) -> str:
    if value is None:
        return "null"
    return _KINDS.get(type(value), "a number" if isinstance(value, float) else "true or false")
