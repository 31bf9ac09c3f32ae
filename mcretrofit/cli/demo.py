"""`mcretrofit demo`: the main job on an embedded model, in about two minutes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mcretrofit.cli import _render as render
from mcretrofit.cli import _results as results
from mcretrofit.cli._models import BUILTIN, loaded
from mcretrofit.cli._options import Json, Seed, caching_flags

FULL, QUICK = (32, 8), (8, 2)  # samples a length, of needles and of text


@caching_flags
def command(
    model: Annotated[str, typer.Option(help="A builtin or any other model.")] = BUILTIN,
    quick: Annotated[bool, typer.Option("--quick", help="A quarter of the samples.")] = False,
    seed: Seed = 42,
    json: Json = False,
    caching: dict[str, Any] | None = None,
) -> None:
    """Show it on a tiny pretrained model.

    Hides a needle in prose, up to eight times as long as the model was trained on, and reads text:
    with caching and without it, nothing trained.
    """
    render.note(f"{model}: one needle hidden in prose, and plain text; nothing is trained")
    found = loaded(model, caching)
    from mcretrofit.compare import Request, cells

    todo = []
    for task, samples in zip(("niah", "perplexity"), QUICK if quick else FULL, strict=True):
        todo += cells(found, Request((task,), samples=samples, seed=seed))
    rows: list[results.Row] = []

    def keep(row: results.Row) -> None:
        rows.append(row)
        if json:
            render.json_row(row)

    try:
        results.measure(found, todo, False, keep)
    finally:
        results.finish(rows, len(rows) == len(todo), json)
