"""What every matrix memory shares: tiles, scans, segment end states, reads (arXiv 2602.24281, 3-5)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.memories import Streams

CHUNK = 64  # a tile of the matrix products, never the unit that is cached
State = Tensor | tuple  # `[B, H, K, V]`, or tensors `[B, H, ...]` in tuples


def wide(streams: Streams) -> Streams:
    """The streams in at least float32: states are never kept narrower."""
    return streams.map(_wide)._replace(inner=_wide_inner(streams))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _wide_inner(streams: Streams):  # noqa: ANN202
    inner = streams.inner
    return None if inner is None else inner._replace(start=tuple(map(_wide, inner.start)))


def tree(function: Callable[..., Tensor], *states: State) -> State:
    """`function` over the tensors of states of one structure."""
    if isinstance(states[0], Tensor):
        return function(*states)
    return tuple(tree(function, *parts) for parts in zip(*states, strict=True))


def leaves(state: State) -> list[Tensor]:
    """The tensors of a state, in order."""
    return [state] if isinstance(state, Tensor) else [x for part in state for x in leaves(part)]


def init_state(streams: Streams, memory: ModuleType | None = None) -> State:
    """What a segment starts from: the empty `[B, H, K, V]`, or what the memory says."""
    if hasattr(memory, "init_state"):
        return memory.init_state(wide(streams))
    batch, _, heads, width = streams.k.shape
    kept = torch.promote_types(streams.v.dtype, torch.float32)
    return streams.v.new_zeros(batch, heads, width, streams.v.shape[-1], dtype=kept)


def read(states: State, q: Tensor, memory: ModuleType | None = None) -> Tensor:
    """Every state read by every query: `[B, N, H, K, V]`, `[B, T, H, K]` -> `[B, T, N, H, V]`.

    Of a memory whose state is a tuple, `states` are its `weights`.
    """
    if hasattr(memory, "read"):
        return memory.read(states, q)
    return torch.einsum("bthk,bnhkv->btnhv", q.to(states.dtype), states)


def weights(state: State, memory: ModuleType) -> State:
    """The part of a state that is cached and read."""
    return memory.weights(state) if hasattr(memory, "weights") else state


def sizes(streams: Streams, memory: ModuleType) -> tuple[int, int, int, int, int]:
    """Heads, key width, value width; numbers a head of a cached state, and of one that runs."""
    state = init_state(streams, memory)
    # what is shared is held once
    cached, running = (
        sum({id(s): s[0, 0].numel() for s in leaves(part)}.values())
        for part in (weights(state, memory), state)
    )
    return (*streams.k.shape[2:], streams.v.shape[3], cached, running)


def naive(memory: ModuleType, streams: Streams, state: State | None = None):
    """Token by token, the oracle: `(out [B, T, H, V], state)`."""
    streams = wide(streams)
    state = init_state(streams, memory) if state is None else state
    outs = []
    for t in range(streams.length):
        out, state = memory.step(streams.map(lambda s, t=t: s[:, t : t + 1]), state)
        outs.append(out)
    return torch.cat(outs, 1), state


def scan(memory: ModuleType, streams: Streams, state: State | None = None):
    """Write-then-read over the whole input with matrix products: `(out [B, T, H, V], state)`."""
    streams = wide(streams)
    state = init_state(streams, memory) if state is None else state
    if streams.length == 1:
        return memory.step(streams, state)
    size = _laid(memory, streams.length)
    out, state, _ = memory.chunks(pad(streams, size), state, size)
    return out[:, : streams.length], state


def scan_segments(memory: ModuleType, streams: Streams, size: int, state: State, init: str):
    """`(out [B, T, H, V], state, ends [B, T / size, H, K, V])`; the input is whole segments.

    `ends` are the running states at the segments' ends. With `reset` every segment but the first
    starts from the initial state and all run side by side; otherwise the state runs through.
    """
    streams = wide(streams)
    batch, length = streams.q.shape[:2]
    if length == 1:
        out, state = memory.step(streams, state)
        return out, state, tree(lambda s: s[:, None], state)
    count = length // size
    whole = _laid(memory, size)
    folded = pad(streams.map(lambda s: s.unflatten(1, (count, size)).flatten(0, 1)), whole)
    if init == "reset":
        fresh = init_state(folded, memory)
        out, ends, _ = memory.chunks(folded, tree(partial(_after, count), state, fresh), whole)
        ends = tree(lambda s: s.unflatten(0, (batch, count)), ends)
        state = tree(lambda s: s[:, -1], ends)
    else:
        joined = folded.map(lambda s: s.unflatten(0, (batch, count)).flatten(1, 2))
        out, state, ends = memory.chunks(joined, state, whole)
    out = out.reshape(batch, count, whole, *out.shape[2:])[:, :, :size]
    return out.flatten(1, 2), state, ends


def _after(count: int, first: Tensor, fresh: Tensor) -> Tensor:
    """Starts of folded segments `[B * count, ...]`: `first [B, ...]`, then fresh ones."""
    fresh = fresh.to(first.dtype).unflatten(0, (-1, count))
    return torch.cat([first[:, None], fresh[:, 1:]], 1).flatten(0, 1)


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


def refusal(segment: int, chunk: int) -> str | None:
    """Why segments cannot be cached of a memory with such inner chunks; None where they can."""
    if segment % chunk == 0:
        return None
    fits = -(-segment // chunk) * chunk
    return f"segments of {segment} tokens cut its inner chunks of {chunk}: --segment {fits} fits"


def _laid(memory: ModuleType, length: int) -> int:
    """The length that a memory's `chunks` is given for `length` tokens."""
    return length if getattr(memory, "RAGGED", False) else tiled(length)


def tile_size(length: int, every: int) -> int:
    """The tile for an input that keeps states after every `every` tokens."""
    return CHUNK if every % CHUNK == 0 else every
