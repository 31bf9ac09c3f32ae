"""`mcretrofit doctor`: is this machine fit for it."""

from __future__ import annotations

from typing import Annotated

import typer

from mcretrofit.cli import _render as render
from mcretrofit.cli._options import Json


def command(
    parity: Annotated[
        bool, typer.Option("--parity", help="Hold every family against its reference instead.")
    ] = False,
    json: Json = False,
) -> None:
    """Report versions and test this machine.

    Exits 1 if the self test, on a pico model, fails.
    """
    if parity:
        from mcretrofit.parity import findings
    else:
        from mcretrofit.doctor import findings

    found = []
    for one in findings():
        found.append(one)
        if json:
            render.json_row(one._asdict())
        elif parity:
            # a family takes seconds in an interpreter of kernels: show each as it is measured
            print(
                f"{one.name:<18} {one.value:<34} {one.state:<7} {one.advice}".rstrip(), flush=True
            )
    if not (json or parity):
        render.table("", ("what", "found", "state", "advice"), found)
    if any(one.state == "failed" for one in found):
        raise typer.Exit(1)
