"""Rows of `compare` as tables, one for each task and dialect, and a recommendation."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcretrofit.cli import _render as render
from mcretrofit.errors import RetrofitError, UsageError

if TYPE_CHECKING:
    from mcretrofit.compare import Cell
    from mcretrofit.model import Loaded

Row = dict[str, Any]
HARNESS = "lm-eval:"
CONTROLS = ("random", "recent", "none", "oracle")


def measure(
    found: Loaded,
    todo: Sequence[Cell],
    base_only: bool,
    keep: Callable[[Row], None],
    controls: bool = False,
) -> None:
    """Run every cell under a progress bar; `keep` gets each row as soon as it is done."""
    from mcretrofit.compare import compare, passes

    total = sum(cell.tokens for cell in todo) * passes(found, base_only, controls)
    how = {"base_only": base_only, "controls": controls, "command": command()}
    names = [f"{cell.task} at {cell.length}" for cell in todo]
    with render.progress(total, names[0]) as tick:
        following = iter([*names[1:], "done"])
        for row in compare(found, todo, **how, tick=tick):
            keep(row)
            tick(0, next(following))


def measure_harness(
    found: Loaded,
    asked: tuple[Sequence[str], Path | None, int | None, int],
    base_only: bool,
    keep: Callable[[Row], None],
) -> None:
    """Run the lm-evaluation-harness tasks among the names: (names, folder, documents, seed)."""
    from mcretrofit.harness_tasks import Asked, harness_rows

    names, include, limit, seed = asked
    own = tuple(name.removeprefix(HARNESS) for name in names if name.startswith(HARNESS))
    more = {"model_hash": found.checkpoint.content(), "command": command()}
    for row in harness_rows(found, Asked(own, include, limit, seed), base_only=base_only, **more):
        keep(row)


def finish(rows: Sequence[Row], complete: bool, as_json: bool) -> None:
    """The tables and, once all is `complete`, the recommendation; `as_json`: only that, on stderr."""
    from mcretrofit.compare import recommendation

    if not as_json:
        show(rows)
    line = recommendation(list(rows)) if complete else None
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
        where = (
            ("length", "depth") if any(row["depth"] is not None for row in some) else ("length",)
        )
        checks = [
            n for n in CONTROLS if any((row["controls"] or {}).get(n) is not None for row in some)
        ]
        columns = (*where, "base", "retrofit", "difference", "95 % interval", "verdict")
        columns = (*columns, *checks, "cache", "seconds")
        if all(row["verdict"] == "base" for row in some):
            bare = [(*_named(row, where), *_bare(row)) for row in some]
            render.table(title, (*where, "base", "seconds"), bare)
        else:
            lines = [(*_named(row, where), *compared(row, checks)) for row in some]
            render.table(title, columns, lines)
        print()


def _named(row: Row, names: Sequence[str]) -> tuple[object, ...]:
    return tuple("-" if row[name] is None else f"{row[name]:g}" for name in names)


def _bare(row: Row) -> tuple[object, ...]:
    return f"{row['base_score']:.3f}", f"{row['base_seconds']:.1f}"


def compared(row: Row, checks: Sequence[str] = ()) -> tuple[object, ...]:
    """Base, retrofit, difference, interval, verdict, the controls `checks`, cache and seconds."""
    spread = "-" if row["low"] is None else f"{row['low']:+.3f} .. {row['high']:+.3f}"
    scores = (f"{row['base_score']:.3f}", f"{row['score']:.3f}")
    apart = f"{row['score'] - row['base_score']:+.3f}"
    cells = (*scores, apart, spread, row["verdict"])
    found = [(row["controls"] or {}).get(name) for name in checks]
    cells = (*cells, *("-" if one is None else f"{one:.3f}" for one in found))
    return (*cells, render.size(row["cache_bytes"]), f"{row['seconds']:.1f}")


def depths(words: Iterable[str]) -> tuple[float, ...]:
    """Depths in percent; raises `UsageError`."""
    found = []
    for word in words:
        try:
            found.append(float(word))
        except ValueError as error:
            raise UsageError(f"--depth {word}: expected percent, such as 0,25,50") from error
    return tuple(dict.fromkeys(found))


def command() -> str:
    """The command line of this process."""
    return shlex.join(["mcretrofit", *sys.argv[1:]])


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
