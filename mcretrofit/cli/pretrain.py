"""`mcretrofit pretrain`: train a small model from a recipe on a folder of text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mcretrofit.cli import _render as render
from mcretrofit.cli._options import Json


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipes/pretrain_*.yaml.")],
    text: Annotated[Path | None, typer.Option(help="A .txt file or a folder of them.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder [runs/RECIPE].")] = None,
    steps: Annotated[int | None, typer.Option(help="Instead of the recipe's steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the recipe's seed.")] = None,
    json: Json = False,
) -> None:
    """Train a small model from a recipe.

    A run that was stopped goes on where it was. Prints the model's folder.
    """
    run = Path("runs") / recipe.stem.removeprefix("pretrain_") if out is None else out
    from mcretrofit.pretrain import pretrain
    from mcretrofit.recipe import read_recipe

    given = None if text is None else str(text)
    chosen = read_recipe(recipe, text=given, steps=steps, seed=seed)
    with render.progress(chosen.steps, chosen.family) as tick:

        def told(step: int, row: dict) -> None:
            loss = f"step {step}: loss {row['loss']:.3f}, prose {row['prose']:.3f}"
            tick(1, f"{loss}, answers {row['answers']:.2f}")
            if json:
                render.json_row(row)

        folder = pretrain(chosen, run, told)
    if json:
        return render.json_row({"folder": str(folder)})
    print(folder)
