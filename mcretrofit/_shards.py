"""Weights written tensor by tensor, in shards: beside the live model no copy of it is ever held."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mcretrofit.checkpoint import Checkpoint
from mcretrofit.errors import RetrofitError
from mcretrofit.tensorfile import DTYPES

_CODES = {getattr(torch, name): code for code, (name, _) in DTYPES.items() if hasattr(torch, name)}
_WIDE = ("A_log", "dt_bias")


class Stored(NamedTuple):
    """A tensor's shape, the dtype that it is written in, and its values in flat pieces."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def held(tensor: Tensor, dtype: torch.dtype) -> Stored:
    """A tensor that is in memory already."""
    return Stored(tuple(tensor.shape), dtype, lambda: (tensor,))


def stored(
    model: nn.Module, checkpoint: Checkpoint | None, asked: torch.dtype | None
) -> dict[str, Stored]:
    """Every tensor of the model once (tied ones under their first name) and its dtype on disk."""
    names: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), name)
    state = model.state_dict()
    dtypes = (
        {} if checkpoint is None else {n: _torch(checkpoint.dtype(n)) for n in checkpoint.names()}
    )
    return {n: held(state[n], _dtype(n, state[n], dtypes, asked)) for n in names.values()}


def written_dtype(name: str, own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """What a tensor is written in that a checkpoint has in its `own` dtype."""
    return torch.float32 if name.endswith(_WIDE) else asked or own


def _dtype(
    name: str, tensor: Tensor, dtypes: Mapping[str, torch.dtype], asked: torch.dtype | None
) -> torch.dtype:
    """What a tensor is written in: the loader's widening is undone where that loses nothing."""
    if name.endswith(_WIDE) or ".mc." in name:
        return torch.float32
    if asked is not None:
        return asked
    # another layout's names say nothing of one tensor, but its narrowest dtype is a fair guess
    kept = dtypes.get(name) or min(dtypes.values(), key=lambda d: d.itemsize, default=tensor.dtype)
    narrower = kept.is_floating_point and kept.itemsize < tensor.element_size()
    same = narrower and torch.equal(tensor.to(kept).to(tensor.dtype), tensor)
    return kept if same else tensor.dtype


def _torch(code: str) -> torch.dtype:
    return getattr(torch, DTYPES[code][0])


def write_weights(folder: Path, tensors: Mapping[str, Stored], shard_size: int) -> None:
    """`model.safetensors`, or numbered shards of up to `shard_size` bytes and their index.

    A tensor above `shard_size` has a shard of its own. Raises OSError where the disk does.
    """
    if shard_size < 1:
        raise RetrofitError(f"a shard of {shard_size} bytes holds nothing: give a larger size")
    shards = _split(tensors, shard_size)
    if len(shards) == 1:
        write_streamed(folder / "model.safetensors", shards[0])
        return
    places = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_streamed(folder / name, shard)
        places |= dict.fromkeys(shard, name)
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": places,
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def write_streamed(path: Path, tensors: Mapping[str, Stored]) -> None:
    """One safetensors file; wide dtypes come first, so that every tensor is aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {
            "dtype": _code(name, tensors[name]),
            "shape": shape,
            "data_offsets": [start, end],
        }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in order:
            begun = file.tell()
            for piece in _raw(tensors[name]):
                file.write(piece)
            if file.tell() - begun != tensors[name].nbytes:
                raise RetrofitError(f"tensor '{name}' changed while it was written: start again")


def _split(tensors: Mapping[str, Stored], size: int) -> list[dict[str, Stored]]:
    shards: list[dict[str, Stored]] = [{}]
    held = 0
    for name, one in tensors.items():
        if shards[-1] and held + one.nbytes > size:
            shards.append({})
            held = 0
        shards[-1][name] = one
        held += one.nbytes
    return shards


def _code(name: str, stored: Stored) -> str:
    if stored.dtype not in _CODES:
        raise RetrofitError(f"tensor '{name}' is {stored.dtype}, which safetensors cannot hold")
    return _CODES[stored.dtype]


def _raw(stored: Stored) -> Iterator[memoryview]:
    for piece in stored.pieces():
        tensor = piece.detach().to("cpu", stored.dtype).contiguous()
        yield memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
