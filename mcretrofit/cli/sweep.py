"""`mcretrofit sweep`: a grid of settings and probes, kept in a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcretrofit.cli import _sweeps as sweeps
from mcretrofit.cli._models import chosen
from mcretrofit.cli._options import Config, Json, grid_flags
from mcretrofit.errors import UsageError

if TYPE_CHECKING:
    from mcretrofit.sweep import Recipe


@grid_flags
def command(
    what: Annotated[
        str | None,
        typer.Argument(metavar="MODEL|RECIPE.yaml", help="A model, or a YAML file of a sweep."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model, in place of the recipe's.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Probes [niah,perplexity].")] = None,
    lengths: Annotated[str | None, typer.Option(help="512,4k or 1x,2x of the trained one.")] = None,
    depth: Annotated[str | None, typer.Option(help="Needle's depths in percent [drawn].")] = None,
    samples: Annotated[str | None, typer.Option(help="Samples a cell [32, of text 8].")] = None,
    seed: Annotated[str | None, typer.Option(help="Seeds of the samples [42].")] = None,
    template: Annotated[str | None, typer.Option(help="Dialects [by vocabulary].")] = None,
    haystack: Annotated[str | None, typer.Option(help="Texts to hide needles in.")] = None,
    pairs: Annotated[str | None, typer.Option(help="Key-value pairs (mqar) [4].")] = None,
    data: Annotated[str | None, typer.Option(help="Your file for squad, longbench ...")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=V1,V2", help="Values of any key, win over all."),
    ] = None,
    controls: Annotated[
        bool | None,
        typer.Option(
            "--controls/--no-controls",
            help="Random, most recent, no and the right segments too [on].",
            show_default=False,
        ),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="The run folder [runs/sweep-NAME].")] = None,
    shard: Annotated[str | None, typer.Option(help="1/4: the first quarter of the cells.")] = None,
    executor: Annotated[str, typer.Option(help="local, or ray for many machines.")] = "local",
    workers: Annotated[int, typer.Option(help="Workers of --executor ray.", min=1)] = 2,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the cells and what they need, run none.")
    ] = False,
    config: Config = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda [cpu].")] = None,
    json: Json = False,
    caching: dict[str, Any] | None = None,
) -> None:
    """Try settings of caching on a model.

    Every setting on every probe and length, on the same samples, with controls. Finished cells are
    kept in the run folder; the same command goes on where it was stopped.
    """
    from mcretrofit.sweep import Recipe, assigned, axes, read_recipe, words

    flags = {"task": ",".join(task) if task else None, "length": lengths, "depth": depth}
    flags |= {"samples": samples, "seed": seed, "template": template, "haystack": haystack}
    flags |= {"pairs": pairs, "data": data, **(caching or {})}
    given = {name: words(text) for name, text in flags.items() if text is not None}
    is_recipe = what is not None and what.endswith((".yaml", ".yml"))
    if what is not None and not is_recipe and model is not None:
        raise UsageError(f"two models: {what} and --model {model}")
    recipe: Recipe = read_recipe(Path(what)) if is_recipe else Recipe({})
    place = model or recipe.model or (None if is_recipe else what)
    if place is None and is_recipe:
        raise UsageError(f"{what} names no model: give one with --model")
    place = chosen(place)
    recipe = Recipe(
        recipe.axes | axes(given, "flags") | assigned(set_ or ()),
        place,
        recipe.controls if controls is None else controls,
        device or recipe.device,
        str(config) if config is not None else recipe.config,
    )
    folder = run or Path("runs") / f"sweep-{Path(what or place).stem.replace(':', '-')}"
    sweeps.carry_out(recipe, folder, shard, (executor, workers), dry_run, json)
