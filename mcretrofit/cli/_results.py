"""Rows of `compare` as tables, one for each task and dialect, and a recommendation."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcretrofit.cli import _render as render
from mcretrofit.errors import RetrofitError

if TYPE_CHECKING:
    from mcretrofit.compare import Cell
    from mcretrofit.model import Loaded

Row = dict[str, Any]


def measure(
    found: Loaded, todo: Sequence[Cell], base_only: bool, keep: Callable[[Row], None]
) -> None:
    """Run every cell under a progress bar; `keep` gets each row as soon as it is done."""
    from mcretrofit.compare import compare, passes

    total = sum(cell.tokens for cell in todo) * passes(found, base_only)
    names = [f"{cell.task} at {cell.length}" for cell in todo]
    with render.progress(total, names[0]) as tick:
        following = iter([*names[1:], "done"])
        for row in compare(found, todo, base_only=base_only, tick=tick):
            keep(row)
            tick(0, next(following))


def finish(rows: Sequence[Row], todo: Sequence[Cell], as_json: bool) -> None:
    """The tables and, once all is done, the recommendation; `as_json`: only that, on stderr."""
    from mcretrofit.compare import recommendation

    if not as_json:
        show(rows)
    line = recommendation(list(rows)) if len(rows) == len(todo) else None
    if line is not None:
        (render.note if as_json else print)(line)


def show(rows: Sequence[Row]) -> None:
    """A table for each task, dialect and metric."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["dialect"], row["metric"]), []).append(row)
    for (task, dialect, metric), some in groups.items():
        pairs = f", {some[0]['pairs']} pairs" if some[0]["pairs"] else ""
        title = f"{task} ({dialect} dialect{pairs}): {metric.replace('_', ' ')}, n {some[0]['n']}"
        columns = ("length", "base", "retrofit", "difference", "95 % interval")
        columns += ("verdict", "cache", "seconds")
        if all(row["verdict"] == "base" for row in some):
            render.table(title, ("length", "base", "seconds"), [_bare(row) for row in some])
        else:
            render.table(title, columns, [_compared(row) for row in some])
        print()


def _bare(row: Row) -> tuple[object, ...]:
    return row["length"], f"{row['base_score']:.3f}", f"{row['base_seconds']:.1f}"


def _compared(row: Row) -> tuple[object, ...]:
    spread = "-" if row["low"] is None else f"{row['low']:+.3f} .. {row['high']:+.3f}"
    scores = (f"{row['base_score']:.3f}", f"{row['score']:.3f}")
    apart = f"{row['score'] - row['base_score']:+.3f}"
    cells = (row["length"], *scores, apart, spread, row["verdict"])
    return (*cells, render.size(row["cache_bytes"]), f"{row['seconds']:.1f}")


def ledger(folder: Path) -> Path | None:
    """Where a wrapped folder keeps its rows; None for any other and for a read-only one."""
    writable = (folder / "caching.json").is_file() and os.access(folder, os.W_OK)
    return folder / "rows.jsonl" if writable else None


def appender(path: Path | None) -> Callable[[Row], None]:
    """A function that adds a row to a `.jsonl` file as soon as it is there; None keeps nothing."""
    if path is None:
        return lambda row: None
    if path.is_dir() or not path.parent.is_dir():
        raise RetrofitError(f"{path} cannot be written: no such folder, or it is one itself")

    def keep(row: Row) -> None:
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise RetrofitError(f"{path} cannot be written: {reason}") from error

    return keep
