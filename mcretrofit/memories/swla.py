"""Sliding-window linear memory `M_t = a_t M_{t-1} + sum_{i<c} beta_t^(i) k_{t-i} v_{t-i}^T`.

Gated linear attention that writes the last c tokens anew at every step (arXiv 2602.24281, eq 26-28).
The state holds the last c - 1 keys and values beside M: a segment that starts empty has no earlier
token to write, one that goes on crosses the boundary. A token whose key is zero is not there at all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.memories import Streams
from mcretrofit.memories._decay import scores
from mcretrofit.memories._scan import init_state as matrix
from mcretrofit.memories._scan import kept, tile_size, tiles, untile

MERGES = False  # a later segment writes tokens of the one before it
State = tuple[Tensor, Tensor, Tensor]  # M [B, H, K, V], keys [B, H, c - 1, K], values


def init_state(streams: Streams) -> State:
    """No writes, and zeros for the tokens before the first."""
    empty, past = matrix(streams), streams.beta.shape[-1] - 1
    batch, heads, keys, values = empty.shape
    return empty, *(empty.new_zeros(batch, heads, past, width) for width in (keys, values))


def weights(state: State) -> Tensor:
    """The matrix that is cached and read."""
    return state[0]


def step(streams: Streams, state: State) -> tuple[Tensor, State]:
    """One token: decay, write it and the ones before it again, read."""
    memory, *past = state
    here = streams.k[:, 0].flatten(1).any(-1).view(-1, 1, 1, 1)
    window = [
        torch.cat([old, new[:, 0, :, None]], 2)
        for old, new in zip(past, (streams.k, streams.v), strict=True)
    ]
    written = window[0] * streams.beta[:, 0].flip(-1)[..., None]
    fresh = kept(memory, None if streams.decay is None else streams.decay[:, 0])
    fresh = fresh + written.transpose(-1, -2) @ window[1]
    memory = torch.where(here, fresh, memory)
    past = [torch.where(here, w[:, :, 1:], old) for w, old in zip(window, past, strict=True)]
    return torch.einsum("bhk,bhkv->bhv", streams.q[:, 0], memory)[:, None], (memory, *past)


def chunks(streams: Streams, state: State, every: int) -> tuple[Tensor, State, State]:
    """Many tokens by tiles: inside a tile a masked product for each token of the window."""
    size = tile_size(streams.length, every)
    memory, *past = state
    lagged, ends = _lagged(streams, past, every)
    there = streams.k.flatten(2).any(-1)[..., None]
    q, beta = tiles(streams.q, size), tiles(streams.beta * there[..., None], size)
    at = None if streams.decay is None else _decays(streams.decay, there, size)
    rest = None if at is None else (at[..., -1:, :] - at).exp()
    inside, writes = 0, 0
    for i, pair in enumerate(lagged):
        k, v = (tiles(s, size) for s in pair)
        v = v * beta[..., i, None]
        inside = inside + scores(q, k, at, at, strict=False) @ v
        writes = writes + (k if rest is None else k * rest).transpose(-1, -2) @ v
    total = None if at is None else at[..., -1, :].exp()[..., None]
    q = q if at is None else q * at.exp()
    outs, states = [], []
    for i in range(q.shape[2]):
        outs.append(q[:, :, i] @ memory)
        memory = writes[:, :, i] + (memory if total is None else memory * total[:, :, i])
        if (i + 1) * size % every == 0:
            states.append(memory)
    out = untile(inside + torch.stack(outs, 2))
    return out, (memory, *(e[:, -1] for e in ends)), (torch.stack(states, 1), *ends)


def _decays(decay: Tensor, there: Tensor, size: int) -> Tensor:
    return tiles(decay * there.view(*there.shape, *[1] * (decay.dim() - 3)), size).cumsum(-2)


def _lagged(streams: Streams, past: list[Tensor], every: int) -> tuple[list, list[Tensor]]:
    """`(k, v)` as they were 0, 1, ... present tokens ago, and the pasts after `every` tokens."""
    before, length = past[0].shape[2], streams.length
    rows = [
        torch.cat([old.transpose(1, 2), new], 1)
        for old, new in zip(past, (streams.k, streams.v), strict=True)
    ]
    there = F.pad(streams.k.flatten(2).any(-1), (before, 0), value=True)
    slots = torch.arange(before + length, device=there.device)
    # the newest present token before each slot; every earlier one is found by following it
    newest = torch.where(there, slots, 0).cummax(1).values
    previous = F.pad(newest[:, :-1], (1, 0))
    here, places = slots[before:].expand(len(there), -1), []
    for _ in range(before + 1):
        places.append(here)
        here = previous.gather(1, here)
    stops = slots[before + every - 1 :: every] if length else slots[:0]
    last, ends = newest[:, stops], []
    for _ in range(before):
        ends.insert(0, last)
        last = previous.gather(1, last)
    lagged = [[_at(x, place) for x in rows] for place in places]
    stacked = [torch.stack([_at(x, end) for end in ends], 3) if ends else None for x in rows]
    empty = [old[:, None, :, :0].expand(-1, len(stops), -1, -1, -1) for old in past]
    return lagged, [e if s is None else s for s, e in zip(stacked, empty, strict=True)]


def _at(x: Tensor, place: Tensor) -> Tensor:
    """`x [B, S, H, D]` at `place [B, T]`."""
    return x.gather(1, place[..., None, None].expand(-1, -1, *x.shape[2:]))


def example(batch: int, length: int, heads: int, width: int, decay: str = "head") -> Streams:
    """Random streams with a window of three; `decay` is `none`, `head` or `channel`."""
    shape = (batch, length, heads, width)
    q, k = (F.normalize(torch.randn(shape), dim=-1) for _ in range(2))
    drawn = {"none": None, "head": torch.randn(shape[:3]), "channel": torch.randn(shape)}[decay]
    log = None if drawn is None else F.logsigmoid(drawn) / 4
    return Streams(q, k, torch.randn(shape), log, torch.rand(*shape[:3], 3))
