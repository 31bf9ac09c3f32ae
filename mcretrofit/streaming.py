"""A model to be exported whose weights stay on disk: its skeleton wrapped, its tensors by the piece."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from mcretrofit import loading, model
from mcretrofit._shards import Stored, held, written_dtype
from mcretrofit.checkpoint import Checkpoint, open_checkpoint
from mcretrofit.errors import RetrofitError, unknown
from mcretrofit.exporting import DTYPE_NAMES
from mcretrofit.models._layout import Part
from mcretrofit.retrofit import retrofit_
from mcretrofit.tensorfile import DTYPES
from mcretrofit.wrapped import check_base, is_wrapped, load_gates, read

_SAME = Part._field_defaults["convert"]


class Streamed(NamedTuple):
    """The model on the meta device, its gates real, and every tensor as it is going to be written."""

    loaded: model.Loaded
    tensors: dict[str, Stored]


def stream(
    place: str | Path, config: str | Path | None = None, dtype: str | None = None
) -> Streamed | None:
    """A MODEL opened for `export`; None where that takes a live model: a class of transformers',
    or a wrapped folder that is not calibrated. Raises `RetrofitError` as loading does."""
    kept = read(place) if is_wrapped(place) else None
    if kept is not None and kept.covers is None:
        return None
    checkpoint = open_checkpoint(place, config) if kept is None else model.base_of(kept)
    found = loading._family(checkpoint)
    if found is None:
        return None
    family, layout = found
    bare = loading.empty(checkpoint, family, layout)
    names = loading.wanted(checkpoint, bare, layout)
    tied = loading._tied(loading._slots(bare))
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise unknown("dtype", dtype, DTYPE_NAMES)
    asked = None if dtype is None else getattr(torch, dtype)
    tensors = {
        # a tied tensor is written under its first name, whichever is stored
        tied.get(name, name): _stored(checkpoint, name, layout.parts[name], asked)
        for name in names
    }
    loaded = model.Loaded(str(place), loading._with_generation(bare, checkpoint), checkpoint)
    if kept is not None:
        check_base(kept, checkpoint)
        if any(cover.heads for cover in kept.covers.values()):
            retrofit_(bare, kept.config, kept.covers)
        load_gates(bare, kept.gates)
        loaded = loaded._replace(config=kept.config, covers=kept.covers)
    elif checkpoint.config.get("caching") is not None:
        loaded = model._exported(loaded, checkpoint.config["caching"])
    gates = {name: t for name, t in bare.state_dict().items() if ".mc." in name}
    return Streamed(loaded, tensors | {name: held(t, torch.float32) for name, t in gates.items()})


def _stored(checkpoint: Checkpoint, name: str, part: Part, asked: torch.dtype | None) -> Stored:
    own = getattr(torch, DTYPES[checkpoint.dtype(part.stored)][0])
    if not own.is_floating_point:
        raise RetrofitError(
            f"{checkpoint.path}: tensor '{part.stored}' is {checkpoint.dtype(part.stored)}; "
            "quantised weights are not supported"
        )

    def pieces() -> Iterator[torch.Tensor]:
        if part.convert is not _SAME:
            yield loading._read(checkpoint, part)
            return
        for piece in checkpoint.pieces(part.stored):
            checkpoint.check_finite(part.stored, piece)
            yield piece

    return Stored(part.shape, written_dtype(name, own, asked), pieces)
