"""`mcretrofit list`: what there is to choose from."""

from __future__ import annotations

from typing import Annotated

import typer

from mcretrofit.catalogue import KINDS, entries
from mcretrofit.cli import _render as render
from mcretrofit.cli._options import Json


def command(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=" | ".join(KINDS))],
    json: Json = False,
) -> None:
    """List the names that options take.

    Variants, routers, families, tasks, aggregators, memories, ops or builtins.
    """
    found = entries(kind)
    if not json:
        return render.table("", ("name", "what it is"), found)
    for entry in found:
        render.json_row(entry._asdict())
