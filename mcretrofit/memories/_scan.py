"""What every matrix memory shares: tiles, scans, segment end states, reads (arXiv 2602.24281, 3-5)."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.memories import Streams

CHUNK = 64  # a tile of the matrix products, never the unit that is cached


def wide(streams: Streams) -> Streams:
    """The streams in at least float32: states are never kept narrower."""
    return streams.map(lambda s: s.to(torch.promote_types(s.dtype, torch.float32)))


def init_state(streams: Streams) -> Tensor:
    """The empty state `[B, H, K, V]`."""
    batch, _, heads, width = streams.k.shape
    kept = torch.promote_types(streams.v.dtype, torch.float32)
    return streams.v.new_zeros(batch, heads, width, streams.v.shape[-1], dtype=kept)


def read(states: Tensor, q: Tensor) -> Tensor:
    """Every state read by every query: `[B, N, H, K, V]`, `[B, T, H, K]` -> `[B, T, N, H, V]`."""
    return torch.einsum("bthk,bnhkv->btnhv", q.to(states.dtype), states)


def naive(memory: ModuleType, streams: Streams, state: Tensor | None = None):
    """Token by token, the oracle: `(out [B, T, H, V], state)`."""
    streams = wide(streams)
    state = init_state(streams) if state is None else state
    outs = []
    for t in range(streams.length):
        out, state = memory.step(streams.map(lambda s, t=t: s[:, t : t + 1]), state)
        outs.append(out)
    return torch.cat(outs, 1), state


def scan(memory: ModuleType, streams: Streams, state: Tensor | None = None):
    """Write-then-read over the whole input with matrix products: `(out [B, T, H, V], state)`."""
    streams = wide(streams)
    state = init_state(streams) if state is None else state
    if streams.length == 1:
        return memory.step(streams, state)
    size = tiled(streams.length)
    out, state, _ = memory.chunks(pad(streams, size), state, size)
    return out[:, : streams.length], state


def scan_segments(memory: ModuleType, streams: Streams, size: int, state: Tensor, init: str):
    """`(out [B, T, H, V], state, ends [B, T / size, H, K, V])`; the input is whole segments.

    `ends` are the running states at the segments' ends. With `reset` every segment but the first
    starts empty and all run side by side; otherwise the state runs through.
    """
    streams = wide(streams)
    batch, length = streams.q.shape[:2]
    if length == 1:
        out, state = memory.step(streams, state)
        return out, state, state[:, None]
    count = length // size
    whole = tiled(size)
    folded = pad(streams.map(lambda s: s.unflatten(1, (count, size)).flatten(0, 1)), whole)
    if init == "reset":
        first = torch.zeros_like(state)[:, None].repeat_interleave(count, 1)
        first = torch.cat([state[:, None], first[:, 1:]], 1).flatten(0, 1)
        out, ends, _ = memory.chunks(folded, first, whole)
        ends = ends.unflatten(0, (batch, count))
        state = ends[:, -1]
    else:
        joined = folded.map(lambda s: s.unflatten(0, (batch, count)).flatten(1, 2))
        out, state, ends = memory.chunks(joined, state, whole)
    out = out.reshape(batch, count, whole, *out.shape[2:])[:, :, :size]
    return out.flatten(1, 2), state, ends


def kept(state: Tensor, decay: Tensor | None) -> Tensor:
    """A state after the total log decay of some tokens (`[..., H]` or `[..., H, K]`)."""
    if decay is None:
        return state
    return (
        state
        * (decay[..., None] if decay.dim() == state.dim() - 1 else decay[..., None, None]).exp()
    )


def pad(streams: Streams, length: int) -> Streams:
    """The streams with inert (all-zero) tokens up to `length`."""
    more = length - streams.length
    if more == 0:
        return streams
    return streams.map(lambda s: F.pad(s, (0,) * (2 * (s.dim() - 2)) + (0, more)))


def tiles(stream: Tensor, size: int) -> Tensor:
    """`[B, T, H, D]` (or `[B, T, H]`) -> `[B, H, T / size, size, D]` (D = 1)."""
    stream = stream[..., None] if stream.dim() == 3 else stream
    return stream.unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4)


def untile(out: Tensor) -> Tensor:
    """`[B, H, N, c, V]` -> `[B, N * c, H, V]`."""
    return out.permute(0, 2, 3, 1, 4).flatten(1, 2)


def tiled(length: int) -> int:
    """The next length that splits into tiles: whole tiles, or a power of two below one tile."""
    return -(-length // CHUNK) * CHUNK if length > CHUNK else 1 << (length - 1).bit_length()


def tile_size(length: int, every: int) -> int:
    """The tile for an input that keeps states after every `every` tokens."""
    return CHUNK if every % CHUNK == 0 else every
