"""Tables, JSON rows, notes and progress: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mcretrofit.pooling import size as size

WIDE = 200  # columns where stdout is no terminal: a file is never wrapped


def note(message: str) -> None:
    """A message for the person, on stderr."""
    print(message, file=sys.stderr, flush=True)


def json_row(row: Any) -> None:
    """One JSON object on one line; numbers that JSON lacks become null."""
    print(json.dumps(_plain(row), allow_nan=False), flush=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table under its title; columns of numbers are set to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if title:
        print(title)
    rows = [[str(cell) for cell in row] for row in rows]
    made = Table(box=None, pad_edge=False, show_header=any(columns))
    for at, name in enumerate(columns):
        number = all(_numeric(row[at]) for row in rows)
        made.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    console.print(made)


def tokens(count: float) -> str:
    """A time constant or a length for people."""
    return "inf" if math.isinf(count) else f"{count:,.0f}"


@contextmanager
def progress(total: int, text: str) -> Iterator[Callable[..., None]]:
    """A bar with the time left, on stderr of a terminal; yields `tick(amount, text=None)`."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        job = bar.add_task(text, total=total)

        def tick(amount: float, text: str | None = None) -> None:
            bar.update(job, advance=amount, **({} if text is None else {"description": text}))

        yield tick


def _numeric(cell: str) -> bool:
    return cell[:1].isdigit() or cell[:1] in "+-" and cell != "" or cell in ("", "inf")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
