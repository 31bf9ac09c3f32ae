"""`mcretrofit bench`: what caching costs in time, as ratios to the unmodified model in one run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcretrofit.cli import _render as render
from mcretrofit.cli._options import Device, Json
from mcretrofit.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from mcretrofit.bench import Row
    from mcretrofit.model import Loaded


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Wrapped folders or checkpoints: what caching costs each. By default random weights.",
        ),
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="A family of `list families` [gated_deltanet].")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the pass, and of the step's context [16384, of a MODEL 4096]."
        ),
    ] = None,
    segment: Annotated[int | None, typer.Option(help="Tokens of a segment [256].")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the slice [4].")] = None,
    width: Annotated[int | None, typer.Option(help="Model width, in 6 heads [768].")] = None,
    repeats: Annotated[int, typer.Option(help="Interleaved runs; the fastest counts.")] = 3,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Time one pass and one decode step, with caching and without, side by side.

    Of MODELs on the shipped prose; without one, random weights in a slice of a 130M shape, and
    softmax attention of that shape beside it.
    """
    asked = {"length": length, "layers": layers, "repeats": repeats}
    for name, value in asked.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value}: has to be at least 1")
    slice_ = {"family": family, "layers": layers, "width": width, "segment": segment}
    if not models:
        if device != "cpu":
            raise UsageError(f"--device {device}: only a MODEL is timed elsewhere than on the CPU")
        return _slice({n: v for n, v in slice_.items() if v is not None}, length, repeats, json)
    strange = [name for name, value in slice_.items() if value is not None]
    if strange:
        raise UsageError(f"--{strange[0]} is of the random weights: a MODEL has its own")
    _models(models, length or 4096, repeats, device, json)


def _slice(given: dict[str, Any], length: int | None, repeats: int, json: bool) -> None:
    from mcretrofit.bench import Shape, bench
    from mcretrofit.config import CachingConfig
    from mcretrofit.registry import load

    segment, length = given.pop("segment", 256), length or 16384
    shape = Shape(**given)
    if shape.width < 6 or shape.width % 6:
        raise UsageError(f"--width {shape.width}: has to be a multiple of 6 heads")
    load("models", shape.family)
    CachingConfig(segment=segment)
    rows = bench(shape, length, segment, repeats, _tell)
    what = {"family": shape.family, "length": length, "segment": segment}
    title = f"{shape.family}, {shape.layers} layers of width {shape.width}, segment {segment}"
    _show(rows, what, f"{title}, {length} tokens", json)


def _models(models: list[str], length: int, repeats: int, device: str, json: bool) -> None:
    from mcretrofit.bench import bench_wrapped
    from mcretrofit.cli._models import loaded

    def rows() -> Iterator[Row]:
        for name in models:
            found = loaded(name, device=device)
            ids = _prompt(found, length)
            yield from bench_wrapped(name, found.model, ids, repeats, _tell)

    _show(rows(), {"length": length}, f"behind {length} tokens of prose", json)


def _prompt(found: Loaded, length: int) -> Tensor:
    """The first tokens of the shipped prose `[1, length]`, from its start again where it ends."""
    import torch

    from mcretrofit.calibrate import shipped_text

    ids = found.tokenizer().encode(shipped_text())
    return torch.tensor([(ids * (length // len(ids) + 1))[:length]], device=found.model.device)


def _show(rows: Iterable[Row], what: dict[str, Any], title: str, json: bool) -> None:
    done: list[Row] = []
    try:
        for row in rows:
            done.append(row)
            if json:
                render.json_row({**what, **row._asdict()})
    finally:
        # where a later model fails, what is timed is timed
        if done and not json:
            columns = ("", "one pass", "ratio", "one step", "ratio", "cached")
            render.table(title, columns, map(_cells, done))


def _cells(row: Row) -> tuple[str, ...]:
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
