"""`mcretrofit bench`: what caching costs in time, as ratios to the unmodified model in one run."""

from __future__ import annotations

from typing import Annotated

import typer

from mcretrofit.cli import _render as render
from mcretrofit.cli._options import Json
from mcretrofit.errors import UsageError


def command(
    family: Annotated[str, typer.Option(help="A family of `mcretrofit list families`.")] = (
        "gated_deltanet"
    ),
    length: Annotated[int, typer.Option(help="Tokens of the pass, and of the step's context.")] = (
        16384
    ),
    segment: Annotated[int, typer.Option(help="Tokens of a segment.")] = 256,
    layers: Annotated[int, typer.Option(help="Layers of the slice.")] = 4,
    width: Annotated[int, typer.Option(help="Model width, in 6 heads.")] = 768,
    repeats: Annotated[int, typer.Option(help="Interleaved runs; the fastest counts.")] = 3,
    json: Json = False,
) -> None:
    """Time one pass and one decode step, with caching and without, side by side.

    Random weights in a slice of a 130M shape; softmax attention of that shape stands beside it.
    """
    for name, value in {"length": length, "layers": layers, "repeats": repeats}.items():
        if value < 1:
            raise UsageError(f"--{name} {value}: has to be at least 1")
    if width < 6 or width % 6:
        raise UsageError(f"--width {width}: has to be a multiple of 6 heads")
    from mcretrofit.bench import Shape, bench
    from mcretrofit.config import CachingConfig
    from mcretrofit.registry import load

    load("models", family)
    CachingConfig(segment=segment)
    rows = []
    for row in bench(Shape(family, layers, width), length, segment, repeats, _tell):
        rows.append(row)
        if json:
            render.json_row(
                {"family": family, "length": length, "segment": segment, **row._asdict()}
            )
    if not json:
        title = f"{family}, {layers} layers of width {width}, segment {segment}, {length} tokens"
        columns = ("", "one pass", "ratio", "one step", "ratio", "cached")
        render.table(title, columns, map(_cells, rows))


def _cells(row) -> tuple[str, ...]:  # noqa: ANN001
    return (
        row.what,
        f"{row.prefill_seconds:.2f} s",
        f"{row.prefill_ratio:.2f}",
        f"{1000 * row.step_seconds:.1f} ms",
        f"{row.step_ratio:.2f}",
        f"{row.cache_bytes / 1e6:.1f} MB",
    )


def _tell(what: str) -> None:
    render.note(f"timing: {what}")
