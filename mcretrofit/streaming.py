"""A model to be exported whose weights stay on disk: its skeleton wrapped, its tensors by the piece."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from mcretrofit import loading, model
from mcretrofit._shards import Stored, held, written_dtype
from mcretrofit.checkpoint import Checkpoint, open_checkpoint
from mcretrofit.errors import RetrofitError, unknown
from mcretrofit.exporting import DTYPE_NAMES
from mcretrofit.hosted import host_skeleton
from mcretrofit.models._layout import Layout, Part
from mcretrofit.retrofit import retrofit_
from mcretrofit.tensorfile import DTYPES
from mcretrofit.wrapped import base_of, check_base, checked_hash, is_wrapped, load_gates, read

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAME = Part._field_defaults["convert"]


class Streamed(NamedTuple):
    """The model on the meta device, its gates real, and every tensor as it is going to be written."""

    loaded: model.Loaded
    tensors: dict[str, Stored]


def stream(
    place: str | Path, config: str | Path | None = None, dtype: str | None = None
) -> Streamed | None:
    """A MODEL opened for `export`; None where that takes a live model: a wrapped folder that is not
    calibrated, a folder of transformers' own class that nothing has loaded yet, as its tensors are
    checked by loading alone. Raises `RetrofitError` as loading does."""
    kept = read(place) if is_wrapped(place) else None
    if kept is not None and kept.covers is None:
        return None
    checkpoint = open_checkpoint(place, config) if kept is None else base_of(kept)
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise unknown("dtype", dtype, DTYPE_NAMES)
    asked = None if dtype is None else getattr(torch, dtype)
    found = loading._family(checkpoint)
    if found is None and kept is None and checkpoint.config.get("caching") is None:
        return None
    opened = _native(checkpoint, asked) if found is None else _ours(checkpoint, *found, asked)
    bare, tensors = opened
    loaded = model.Loaded(str(place), loading._with_generation(bare, checkpoint), checkpoint)
    if kept is not None:
        check_base(kept, checkpoint)
        if kept.base.get("sha256") is not None:
            checked_hash(kept, checkpoint)
        if any(cover.heads for cover in kept.covers.values()):
            retrofit_(bare, kept.config, kept.covers)
        load_gates(bare, kept.gates)
        loaded = loaded._replace(config=kept.config, covers=kept.covers)
    elif checkpoint.config.get("caching") is not None:
        loaded = model._exported(loaded, checkpoint.config["caching"])
    gates = {name: t for name, t in bare.state_dict().items() if ".mc." in name}
    return Streamed(loaded, tensors | {name: held(t, torch.float32) for name, t in gates.items()})


def _ours(
    checkpoint: Checkpoint, family: str, layout: Layout, asked: torch.dtype | None
) -> tuple[PreTrainedModel, dict[str, Stored]]:
    bare = loading.empty(checkpoint, family, layout)
    names = loading.wanted(checkpoint, bare, layout)
    tied = loading._tied(loading._slots(bare))
    return bare, {
        # a tied tensor is written under its first name, whichever is stored
        tied.get(name, name): _stored(checkpoint, name, layout.parts[name], asked)
        for name in names
    }


def _native(
    checkpoint: Checkpoint, asked: torch.dtype | None
) -> tuple[PreTrainedModel, dict[str, Stored]]:
    """transformers' own class: its tensors stay named and split as they are on disk."""
    bare = host_skeleton(checkpoint)
    names = [name for name in checkpoint.names() if ".mc." not in name]
    parts = {name: Part(name, checkpoint.shape(name)) for name in names}
    tensors = {name: _stored(checkpoint, name, parts[name], asked) for name in names}
    if asked is None:
        # decays too, whatever they are in: the base is to come back bit for bit
        tensors = {n: t._replace(dtype=_own(checkpoint, n)) for n, t in tensors.items()}
    return bare, tensors


def _own(checkpoint: Checkpoint, name: str) -> torch.dtype:
    return getattr(torch, DTYPES[checkpoint.dtype(name)][0])


def _stored(checkpoint: Checkpoint, name: str, part: Part, asked: torch.dtype | None) -> Stored:
    own = _own(checkpoint, part.stored)
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
