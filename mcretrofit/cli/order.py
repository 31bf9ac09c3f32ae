"""`mcretrofit order`: train bases and variants side by side and print the table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mcretrofit.cli import _render as render
from mcretrofit.cli._options import Json


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Such as recipes/order.yaml.")],
    text: Annotated[Path | None, typer.Option(help="A .txt file or a folder of them.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder [runs/RECIPE].")] = None,
    picture: Annotated[Path | None, typer.Option(help="Training curves, .png or .svg.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Train nothing: what there is.")] = False,
    json: Json = False,
) -> None:
    """Train every base with every variant from scratch and compare.

    Prints a Markdown table. A run that was stopped goes on where it was; several processes may share
    a folder.
    """
    folder = Path("runs") / recipe.stem if out is None else out
    from mcretrofit.ledger import Ledger
    from mcretrofit.order import read_order, run
    from mcretrofit.ordertable import draw, markdown

    order = read_order(recipe, text=None if text is None else str(text))
    cells = list(order.cells())
    if not table:
        with render.progress(len(cells), "order") as tick:

            def told(cell, rows: list[dict]) -> None:  # noqa: ANN001
                tick(1, f"{cell.model}, {cell.variant}, seed {cell.recipe.seed}")
                for row in rows:
                    render.note(
                        f"{cell.model}, {cell.variant}, seed {cell.recipe.seed}: " + _said(row)
                    )

            run(order, folder, told)
    known = {cell.id for cell in cells}
    rows = [row for row in Ledger(folder).rows.values() if row.get("cell") in known]
    place = {cell.id: at for at, cell in enumerate(cells)}
    rows.sort(key=lambda row: place[row["cell"]])
    if picture is not None:
        draw(rows, folder / "cells", picture)
    if not json:
        return print(markdown(rows, order.expected), end="")
    for row in rows:
        render.json_row(row)


def _said(row: dict) -> str:
    return f"{row['task']} at {row['length']}: {row['score']:.3f}, {row['cpu_seconds']:.0f} s"
