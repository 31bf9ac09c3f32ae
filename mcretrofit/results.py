"""Rows of results as `eval` and `sweep` write them: read, and named by their setting.

A row says what was measured (task, dialect, length, depth) on which model with which setting.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mcretrofit.errors import RetrofitError

Row = Mapping[str, Any]
FILE = "rows.jsonl"
SETTING = ("variant", "segment", "router", "init", "top_k", "heads", "margin")
PROBE = ("task", "dialect", "metric", "pairs", "dataset", "template", "haystack", "data", "options")
CELL = (*PROBE, "length", "depth", "seed")
_NEEDED = ("task", "metric", "length", "variant", "score")


class Found(NamedTuple):
    """The rows of a file, and a line for each thing in it that does not count."""

    path: Path
    rows: list[dict[str, Any]]
    warnings: list[str]


def read(run: str | Path) -> Found:
    """The rows of a run folder or a `.jsonl` file; a line that is no row becomes a warning.

    Of rows with one `id` the first counts, of other rows of one cell and setting the newest.
    Raises RetrofitError where nothing is left.
    """
    path = Path(run) / FILE if Path(run).is_dir() else Path(run)
    if not path.is_file():
        hint = "mcretrofit sweep or eval --out writes one"
        raise RetrofitError(f"{path}: no such file of results; {hint}")
    rows: dict[tuple, dict[str, Any]] = {}
    faults: dict[int, str] = {}
    ids, older = set(), 0
    # bytes that are no text spoil their own line only
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        row, fault = _parsed(line) if line.strip() else (None, None)
        if fault is not None:
            faults[number] = fault
        if row is None or row.get("id") in ids:
            continue
        ids |= {row["id"]} if row.get("id") is not None else set()
        key = (model(row), setting(row), cell(row))
        older += rows.pop(key, None) is not None
        rows[key] = row
    warnings = [f"{path}, line {number}: {fault}; left out" for number, fault in faults.items()]
    if older:
        warnings.append(f"{path}: {older} rows are left out, newer ones of the same cell count")
    if not rows:
        raise RetrofitError(f"{path} holds no rows of results{_named(faults)}")
    return Found(path, list(rows.values()), warnings)


def _named(faults: Mapping[int, str]) -> str:
    """Every line that is no row, those with one fault together: `; lines 1, 3: not JSON`."""
    lines: dict[str, list[str]] = {}
    for number, fault in faults.items():
        lines.setdefault(fault, []).append(str(number))
    return "".join(
        f"; line{'s' * (len(some) > 1)} {', '.join(some)}: {fault}" for fault, some in lines.items()
    )


def _parsed(line: str) -> tuple[dict[str, Any] | None, str | None]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None, "not JSON"
    fault = _fault(row)
    return (row, None) if fault is None else (None, fault)


def _fault(row: Any) -> str | None:
    """What makes a value no row of results."""
    if not isinstance(row, dict):
        return "not a JSON object"
    missing = [name for name in _NEEDED if row.get(name) is None]
    if missing:
        return f"{missing[0]} is missing"
    texts = ("task", "metric", "variant", "model", "dialect", "verdict", "id", "model_hash")
    numbers = ("score", "base_score", "low", "high", "depth", "cache_bytes")
    numbers += ("prefill_ratio", "decode_ratio", "seed", "pairs")
    wrong = [f"{n} is not text" for n in texts if not isinstance(row.get(n), (str, type(None)))]
    wrong += [f"{n} is not a finite number" for n in numbers if not _number(row.get(n, 0), True)]
    for name in ("length", "n"):
        if not isinstance(row.get(name, 1), int) or row.get(name, 1) < 1:
            wrong.append(f"{name} is not a whole number of at least 1")
    if not _lists(row.get("scores"), row.get("base_scores")):
        wrong.append("scores and base_scores are not two lists of as many numbers")
    if not all(len(r) == 4 and all(map(_number, r)) for r in _some(row, "by_position", list)):
        wrong.append("by_position is not a list of four numbers each")
    for name in ("controls", "caching", "control_intervals"):
        if not isinstance(row.get(name), (dict, type(None))):
            wrong.append(f"{name} is not an object")
    if not wrong and not all(_number(v, True) for v in (row.get("controls") or {}).values()):
        wrong.append("controls are not numbers")
    return wrong[0] if wrong else None


def _number(value: Any, none: bool = False) -> bool:
    if value is None or isinstance(value, bool):
        return none and value is None
    return isinstance(value, (int, float)) and math.isfinite(value)


def _some(row: Row, name: str, kind: type) -> list[Any]:
    """A list of the row; what is none of it becomes one empty item, which no check accepts."""
    found = row.get(name)
    if found is None:
        return []
    return found if isinstance(found, list) and all(isinstance(i, kind) for i in found) else [[]]


def _lists(*found: Any) -> bool:
    if any(some is None for some in found):
        return True
    numbers = all(isinstance(some, list) and all(map(_number, some)) for some in found)
    return numbers and len({len(some) for some in found}) == 1


def model(row: Row) -> tuple[str, str]:
    """Name and hash: rows of two models are never compared."""
    return row.get("model") or "", row.get("model_hash") or ""


def cell(row: Row) -> tuple[Any, ...]:
    """What was measured, whatever the setting."""
    return tuple(_still(row.get(name)) for name in CELL)


def probe(row: Row) -> tuple[Any, ...]:
    """What is never mixed in one table, in the order of PROBE."""
    return tuple(_still(row.get(name)) for name in PROBE)


def _still(value: Any) -> Any:
    """A value that can be a key: an object as its text, an empty one as none at all."""
    if isinstance(value, (dict, list)):
        return json.dumps(value, sort_keys=True) if value else None
    return value


def caching(row: Row) -> dict[str, Any] | None:
    """The setting's own words, None for the unmodified model."""
    if row["variant"] == "base":
        return None
    return dict(row.get("caching") or {n: row[n] for n in SETTING if row.get(n) is not None})


def setting(row: Row) -> str:
    """A key for the setting; that of the unmodified model is empty."""
    found = caching(row)
    return "" if found is None else json.dumps(found, sort_keys=True)


def labels(rows: Iterable[Row]) -> dict[str, str]:
    """By key the shortest name that tells the settings apart: variant, segment, what else varies."""
    some = {setting(row): caching(row) or {} for row in rows if setting(row)}
    names = {name: None for one in some.values() for name in one}
    values = {n: {json.dumps(o[n]) for o in some.values() if n in o} for n in names}
    vary = [n for n in names if len(values[n]) > 1 and n not in ("variant", "segment")]
    made = {}
    for key, one in some.items():
        head = " ".join(str(one[n]) for n in ("variant", "segment") if n in one)
        more = [f"{n} {_word(one[n])}" for n in vary if n in one]
        made[key] = ", ".join([head, *more])
    return made


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
