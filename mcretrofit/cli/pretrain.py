"""`mcretrofit pretrain`: train a small model from a recipe on a folder of text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from mcretrofit.cli import _render as render
from mcretrofit.cli._options import Device, Json


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipes/pretrain_*.yaml.")],
    text: Annotated[Path | None, typer.Option(help="A .txt file or a folder of them.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder [runs/RECIPE].")] = None,
    steps: Annotated[int | None, typer.Option(help="Instead of the recipe's steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the recipe's seed.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print sizes, steps and memory; train nothing.")
    ] = False,
    processes: Annotated[int, typer.Option(help="Of torchrun, for --dry-run.")] = 1,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Train a model from a recipe.

    A run that was stopped goes on where it was; under torchrun every process takes its share of each
    batch. Prints the model's folder.
    """
    run = Path("runs") / recipe.stem.removeprefix("pretrain_") if out is None else out
    from mcretrofit.pretrain import pretrain
    from mcretrofit.recipe import read_recipe

    given = None if text is None else str(text)
    chosen = read_recipe(recipe, text=given, steps=steps, seed=seed)
    if dry_run:
        from mcretrofit.preview import preview

        return _previewed(preview(chosen, processes), json)
    first = os.environ.get("RANK", "0") == "0"
    with render.progress(chosen.steps, chosen.family) as tick:

        def told(step: int, row: dict) -> None:
            loss = f"step {step}: loss {row['loss']:.3f}, prose {row['prose']:.3f}"
            tick(1, f"{loss}, answers {row['answers']:.2f}")
            if json:
                render.json_row(row)

        folder = pretrain(chosen, run, told, device)
    if not first:
        return None
    if json:
        return render.json_row({"folder": str(folder)})
    print(folder)


def _previewed(found: dict[str, Any], json: bool) -> None:
    if json:
        return render.json_row(found)
    parts = found.pop("bytes")
    rows = [(name.replace("_", " "), _number(value)) for name, value in found.items()]
    rows += [(f"memory: {name}", render.size(count)) for name, count in parts.items()]
    rows += [("memory, at least", render.size(sum(parts.values())))]
    render.table("", ("", ""), rows)


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
