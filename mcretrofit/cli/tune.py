"""`mcretrofit tune`: train the gates of a wrapped model, its base frozen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcretrofit.cli import _render as render
from mcretrofit.cli._models import FOLDER, check_device
from mcretrofit.cli._options import Config, Device, Force, Json, Set, gate_flags
from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.settings import assigned

if TYPE_CHECKING:
    from mcretrofit.tune import Tuned

YAML = (".yaml", ".yml")
MODEL = "What wrap takes, a wrapped folder, or a recipes/tune_*.yaml. By default ./retrofit."


@gate_flags
def command(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL)] = None,
    data: Annotated[
        Path | None, typer.Option(help="Text: a .txt file or a folder of them [ships with it].")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="A YAML file of all of these.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder to write [./retrofit; a wrapped one itself].")
    ] = None,
    run: Annotated[
        Path | None,
        # torchrun takes --run for the beginning of an option of its own
        typer.Option(
            "--run", "--run-folder", help="State and losses, to go on from [runs/tune-OUT]."
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens of a sequence [8 segments, 4 trained lengths].")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the optimiser [100].")] = None,
    minutes: Annotated[float | None, typer.Option(help="Minutes to train at most [10].")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate at its highest [0.001].")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Sequences a step [1].")] = None,
    checkpointing: Annotated[
        bool | None, typer.Option(help="Compute blocks twice to hold less.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the base: fp32 or bf16 [fp32].")] = None,
    seed: Annotated[int | None, typer.Option(help="Of data and gates [0].")] = None,
    force: Force = False,
    config: Config = None,
    device: Device = "cpu",
    set_: Set = None,
    json: Json = False,
    caching: dict[str, Any] | None = None,
) -> None:
    """Train gates: questions, an online bias, a temperature.

    The base is frozen; gates start as the identity, and are kept where other facts confirm that they
    answer more and leave prose alone. A run that was stopped goes on where it was.
    """
    if model is not None and model.endswith(YAML):
        if recipe is not None:
            raise UsageError(f"{model} and --recipe {recipe}: one recipe at a time")
        model, recipe = None, Path(model)
    check_device(device)
    given = {"data": data and str(data), "out": out and str(out), "length": length, "steps": steps}
    given |= {"minutes": minutes, "lr": lr, "accumulate": accumulate, "dtype": dtype, "seed": seed}
    from mcretrofit.tuning import read_tuning

    tuning = read_tuning(recipe, {**given, "model": model, "checkpointing": checkpointing})
    place = tuning.model or FOLDER
    if tuning.model is None and not (Path(FOLDER) / "caching.json").is_file():
        raise RetrofitError(f"no ./{FOLDER} here to tune: give a MODEL, such as builtin:gla")
    flags = {**(caching or {}), **dict(map(assigned, set_ or ()))}
    from mcretrofit.tune import tune

    first = os.environ.get("RANK", "0") == "0"
    with render.progress(tuning.steps, "tune") as bar:
        done = tune(
            place,
            tuning,
            flags=flags,
            run=run,
            config=config,
            device=device,
            force=force,
            say=(render.note if json else print) if first else lambda _: None,
            tick=_ticker(bar, first),
        )
    if first:
        _tell(done, json)


def _ticker(bar: Any, first: bool) -> Any:
    def tick(step: int, row: dict) -> None:
        check = row.get("check")
        if check is None:
            return bar(1, f"step {step}: loss {row['loss']:.3f}")
        if first:
            render.note(
                f"step {step}: answers {check.right:.3f} ({check.answers:.3f} nats), inside the "
                f"trained length {check.near_right:.3f}, prose {check.prose:.4f}"
            )

    return tick


def _tell(done: Tuned, json: bool) -> None:
    found, trained = done.confirmed, done.trained
    for note in done.notes:
        render.note(note)
    if json:
        row = {"folder": str(done.folder), "run": str(done.run), "kept": done.kept, "why": done.why}
        row |= {"steps": trained.steps, "stopped": trained.stopped, "sha256": done.sha256}
        row |= {name: getattr(trained, name)._asdict() for name in ("base", "start", "best")}
        return render.json_row({**row, "confirmed": found and found._asdict()})
    print(f"{trained.steps} steps: {trained.stopped}; losses in {done.run}")
    if found is not None:
        names = ("base", "untrained gates", "tuned")
        shares = [[f"{share:.3f}" for share in shares] for shares in (found.right, found.near)]
        columns = ("planted facts answered", "far", "inside the trained length")
        render.table("", columns, zip(names, *shares, strict=True))
        print(
            f"on other facts {found.low:+.3f} .. {found.high:+.3f} nats an answer better (95 %), "
            f"prose {found.prose:+.2%} of the base's"
        )
    print(f"base untouched: sha256 {done.sha256}")
    if done.kept:
        print(f"wrote {done.folder} with the gates of step {trained.best.step}")
    else:
        print(f"keep the untrained gates: {done.why} ({done.folder} reads without gates)")
