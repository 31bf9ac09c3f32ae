"""Reading safetensors files that nobody vouches for: every claim of a header is checked first."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mcretrofit.atomic import sha256, write_atomic_folder, write_safetensors
from mcretrofit.errors import RetrofitError
from mcretrofit.rawfile import JSON_LIMIT, file_size, parse_json, read_bytes, refuse_pointer, show

if TYPE_CHECKING:
    import torch

__all__ = [
    "TensorInfo",
    "read_header",
    "read_metadata",
    "read_pieces",
    "read_tensor",
    "sha256",
    "write_atomic_folder",
    "write_safetensors",
]

# safetensors' code -> (torch's name, bytes per element)
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "C64": ("complex64", 8),
    "BOOL": ("bool", 1),
    **{f"I{bits}": (f"int{bits}", bits // 8) for bits in (8, 16, 32, 64)},
    **{f"U{bits}": (f"uint{bits}", bits // 8) for bits in (8, 16, 32, 64)},
}
_MAX_DIMENSIONS = 32
_MAX_ELEMENTS = 2**62


class TensorInfo(NamedTuple):
    """Where a tensor lies: bytes [start, end) of `file`; 0, 0 where the format does not say."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a safetensors file, in file order, from its header alone.

    Raises RetrofitError unless the tensors fill the file exactly, each with its own bytes.
    """
    path = Path(path)
    entries, data_start = _raw_header(path)
    entries.pop("__metadata__", None)
    infos = [_tensor(path, name, entry, data_start) for name, entry in entries.items()]
    infos.sort(key=lambda info: (info.start, info.end))
    _check_layout(path, infos, data_start)
    return {info.name: info for info in infos}


def read_metadata(path: Path) -> dict[str, str]:
    """The text-to-text notes in a safetensors header, empty when it has none."""
    notes = _raw_header(Path(path))[0].get("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(text, str) for text in notes.values()):
        raise RetrofitError(f"{show(path)}: __metadata__ does not map text to text")
    return notes


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """A tensor's own copy of its bytes; `info` must come from `read_header`."""
    import torch

    dtype = getattr(torch, DTYPES[info.dtype][0])
    if info.end == info.start:
        return torch.empty(info.shape, dtype=dtype)
    # a copy rather than a map: a file that shrinks under a map kills the process
    raw = read_bytes(info.file, info.start, info.end - info.start)
    return torch.frombuffer(raw, dtype=dtype).reshape(info.shape)


def read_pieces(info: TensorInfo, most: int) -> Iterator[torch.Tensor]:
    """The same values in order, in flat tensors of up to `most` elements."""
    import torch

    name, width = DTYPES[info.dtype]
    for start in range(info.start, info.end, most * width):
        raw = read_bytes(info.file, start, min(most * width, info.end - start))
        yield torch.frombuffer(raw, dtype=getattr(torch, name))


def _raw_header(path: Path) -> tuple[dict[str, Any], int]:
    size = file_size(path)
    head = read_bytes(path, 0, min(size, 32))
    refuse_pointer(path, head)
    if size < 10:
        raise RetrofitError(f"{show(path)} is too short for a safetensors file: {size} bytes")
    length = int.from_bytes(head[:8], "little")
    if length > size - 8 or head[8:9] != b"{":
        raise RetrofitError(f"{show(path)} is not a safetensors file, or it is cut off")
    if length > JSON_LIMIT:
        raise RetrofitError(f"{show(path)}: the header claims {length} bytes, far too many")
    header = parse_json(read_bytes(path, 8, length), f"{show(path)}: the header")
    return header, 8 + length


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number <= _MAX_ELEMENTS


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    where = f"{show(path)}: tensor '{show(name)}'"
    if not name.isprintable():
        raise RetrofitError(f"{where} has an unprintable name")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise RetrofitError(f"{where} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise RetrofitError(
            f"{where} has the dtype {reprlib.repr(dtype)}; known: {', '.join(DTYPES)}"
        )
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        raise RetrofitError(f"{where}: its shape is not a list of up to {_MAX_DIMENSIONS} sizes")
    if not all(map(_is_size, shape)) or prod(max(size, 1) for size in shape) > _MAX_ELEMENTS:
        raise RetrofitError(f"{where} has the impossible shape {reprlib.repr(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise RetrofitError(f"{where} has the impossible data_offsets {reprlib.repr(offsets)}")
    start, end = offsets
    needs = prod(shape) * DTYPES[dtype][1]
    if end - start != needs:
        raise RetrofitError(f"{where}: {dtype} {shape} needs {needs} bytes, has {end - start}")
    return TensorInfo(name, dtype, tuple(shape), path, data_start + start, data_start + end)


def _check_layout(path: Path, infos: Iterable[TensorInfo], position: int) -> None:
    size = file_size(path)
    for info in infos:
        where = f"{show(path)}: tensor '{show(info.name)}'"
        if info.end > size:
            raise RetrofitError(f"{where} ends at byte {info.end} of {size}: is the file cut off?")
        if info.start != position:
            fault = "overlaps the one before it" if info.start < position else "follows a hole"
            raise RetrofitError(f"{where} {fault} at byte {info.start}")
        position = info.end
    if position != size:
        raise RetrofitError(f"{show(path)}: {size - position} bytes belong to no tensor")
