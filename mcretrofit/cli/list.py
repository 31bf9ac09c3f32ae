"""`mcretrofit list`: what there is to choose from."""

from __future__ import annotations

from typing import Annotated

import typer

from mcretrofit.catalogue import KINDS, Family, entries
from mcretrofit.cli import _render as render
from mcretrofit.cli._options import Json


def command(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=" | ".join(KINDS))],
    json: Json = False,
) -> None:
    """List the names that options take.

    Variants, routers, families, tasks, aggregators, memories, ops, builtins, or hosts: the models of
    transformers that keep their own class.
    """
    found = entries(kind)
    if not json and kind == "families":
        columns = ("name", "layouts", "memory", "parity with", "by")
        return render.table("", columns, map(_row, found))
    if not json:
        return render.table("", ("name", "what it is"), found)
    for entry in found:
        render.json_row(entry._asdict())


def _row(family: Family) -> tuple[str, ...]:
    return (
        *(family.name, ", ".join(family.layouts) or "-", family.memory or "-"),
        *(family.parity or "-", family.tested or "-"),
    )
