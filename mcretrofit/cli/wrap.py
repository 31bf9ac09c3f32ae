"""`mcretrofit wrap`: choose heads, measure them on text, write the wrapped folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcretrofit.cli import _render as render
from mcretrofit.cli._models import FOLDER, prose
from mcretrofit.cli._options import Config, Force, Json, Model, Recipe, Set, caching_flags
from mcretrofit.cli.calibrate import tell
from mcretrofit.errors import UsageError
from mcretrofit.settings import settings

if TYPE_CHECKING:
    from mcretrofit.calibrate import Head
    from mcretrofit.wrap import Wrapping

MANY = 40  # heads: above it the table has a row a mixer


@caching_flags
def command(
    model: Model,
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path(FOLDER),
    force: Force = False,
    config: Config = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Text to measure heads on, a file or a folder; prose ships with the package."
        ),
    ] = None,
    no_calibrate: Annotated[
        bool, typer.Option("--no-calibrate", help="Read headers only; measure on the first load.")
    ] = False,
    search: Annotated[
        bool,
        typer.Option("--search", help="Choose heads and thresholds as `calibrate` does: minutes."),
    ] = False,
    recipe: Recipe = None,
    set_: Set = None,
    json: Json = False,
    caching: dict[str, Any] | None = None,
) -> None:
    """Put caching around a checkpoint.

    Measures its heads on text and writes ./retrofit, which names the checkpoint and copies no
    weight. What decides: defaults, then --recipe, then flags, then --set.
    """
    chosen = settings(None, recipe, caching, set_ or ())
    if calibrate is not None and no_calibrate:
        raise UsageError("--calibrate and --no-calibrate exclude each other")
    text = prose(calibrate, "--calibrate")
    if search and no_calibrate:
        raise UsageError("--search and --no-calibrate exclude each other")
    from mcretrofit.wrap import Search, wrap

    done = wrap(
        model,
        out,
        chosen,
        config=config,
        text=text,
        calibrate=not no_calibrate,
        search=Search(tick=render.note) if search else None,
        force=force,
    )
    if json:
        told = {**done._asdict(), "folder": str(done.folder)}
        found = told.pop("found")
        told["keeps_base"] = None if found is None else found.keeps_base
        told["measured"] = [head._asdict() for head in told.pop("heads")]
        render.json_row({"model": model, **asdict(chosen), **told})
    else:
        _tell(done, model)


def _tell(done: Wrapping, model: str) -> None:
    print(f"{done.summary} of {model} ({done.family}) into {done.folder}")
    if done.found is not None:
        tell(done)
    elif 0 < len(done.heads) <= MANY:
        render.table(
            "", ("mixer", "head", *_COLUMNS, "score mean", "std", "why"), map(_row, done.heads)
        )
    elif done.heads:
        render.table("", ("mixer", *_COLUMNS), _by_mixer(done.heads))
    for warning in done.warnings:
        render.note(f"warning: {warning}")


_COLUMNS = ("time constant", "cached channels", "cached")


def _row(head: Head) -> tuple[object, ...]:
    cells = (head.mixer, head.head, render.tokens(head.tau), f"{head.slow} of {head.keys}")
    scores = ("-" if value is None else f"{value:.4g}" for value in (head.mean, head.std))
    return (*cells, "yes" if head.cached else "no", *scores, head.why)


def _by_mixer(heads: list[Head]) -> list[tuple[str, ...]]:
    rows = []
    for name in dict.fromkeys(head.mixer for head in heads):
        some = [head for head in heads if head.mixer == name]
        taus = sorted(head.tau for head in some)
        spread = f"{render.tokens(taus[0])} to {render.tokens(taus[-1])}"
        slow = f"{sum(h.slow for h in some)} of {sum(h.keys for h in some)}"
        rows.append((name, spread, slow, f"{sum(h.cached for h in some)} of {len(some)} heads"))
    return rows
