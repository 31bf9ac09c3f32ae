"""`mcretrofit report`: what a run has shown, in tables and as a page, Markdown or CSV."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mcretrofit.cli import _render as render
from mcretrofit.cli._options import Json

if TYPE_CHECKING:
    from mcretrofit._tables import Line
    from mcretrofit.report import Part, Report

Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="A folder with rows.jsonl, or a .jsonl file.")
]


def command(
    run: Run,
    html: Annotated[
        Path | None, typer.Option(help="One page with charts that needs no network.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="The tables as Markdown.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Every row as CSV.")] = None,
    json: Json = False,
) -> None:
    """Show what a run has found.

    A table for each task, lengths as columns; every setting with its difference to the base on the
    same samples, its controls and its cost; then the setting to use, or to keep the base.
    """
    from mcretrofit import report as library
    from mcretrofit.results import read

    found = read(run)
    made = library.build(found)
    for warning in made.warnings:
        render.note(f"warning: {warning}")
    texts = ((html, library.html), (markdown, library.markdown), (csv, library.table_of_rows))
    # all of them before the first is written: what cannot be made leaves nothing behind
    files = [(path, make(made)) for path, make in texts if path is not None]
    for path, text in files:
        library.write(path, text, found.path)
        render.note(f"wrote {path}")
    if json:
        for one in library.objects(made):
            render.json_row(one)
    else:
        _tables(made)


def _tables(made: Report) -> None:
    from mcretrofit.report import COST_COLUMNS, cost_cells

    for part in made.parts:
        for table in part.tables:
            model = f"{part.model}: " if len(made.parts) > 1 else ""
            title = f"{model}{table.title}: {table.measure}"
            render.table(title, ("setting", *map(str, table.lengths)), map(_cells, table.lines))
            print()
        if part.costs:
            render.table("cost", COST_COLUMNS, map(cost_cells, part.costs))
            print()
        _advise(made, part)


def _cells(line: Line) -> tuple[str, ...]:
    from mcretrofit.report import words

    if line.kind == "control":
        scores = (" -" if entry is None else f" {entry.score:.3f}" for entry in line.entries)
        return (f"  {line.label}", *scores)
    # a blank first: the scores of a column stand under each other, whatever follows them
    return (line.label, *(f" {words(entry, chr(10) + ' ')}" for entry in line.entries))


def _advise(made: Report, part: Part) -> None:
    print(f"{part.model}: {part.advice.line}" if len(made.parts) > 1 else part.advice.line)
