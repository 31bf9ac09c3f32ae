"""RWKV-5 and 6 memory `S_t = diag(exp g_t) S_{t-1} + k_t v_t^T`, read before the write: `q_t S_{t-1}`.

A linear memory (arXiv 2404.05892) whose token never sees itself; its bonus for the current token goes
past the memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.memories import Streams
from mcretrofit.memories._decay import scores
from mcretrofit.memories._scan import kept, tile_size, tiles, untile

MERGES = False  # states add up, but a token that closes a segment would read its own write
READS_FIRST = True


def step(streams: Streams, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: read, decay, write."""
    q, k, v = (s[:, 0] for s in streams[:3])
    out = torch.einsum("bhk,bhkv->bhv", q, state)[:, None]
    return out, kept(state, streams.decay[:, 0]) + k[..., None] * v[..., None, :]


def chunks(streams: Streams, state: Tensor, every: int) -> tuple[Tensor, Tensor, Tensor]:
    """Many tokens by tiles: inside a tile a strictly masked product, between tiles the state."""
    size = tile_size(streams.length, every)
    q, k, v, log = (tiles(s, size) for s in (*streams[:3], streams.decay))
    at = log.cumsum(-2)
    before = at - log
    inside = scores(q, k, before, at, strict=True) @ v
    q, k = q * before.exp(), k * (at[..., -1:, :] - at).exp()
    total, writes = at[..., -1, :].exp()[..., None], k.transpose(-1, -2) @ v
    outs, ends = [], []
    for i in range(q.shape[2]):
        outs.append(q[:, :, i] @ state)
        state = writes[:, :, i] + state * total[:, :, i]
        if (i + 1) * size % every == 0:
            ends.append(state)
    return untile(inside + torch.stack(outs, 2)), state, torch.stack(ends, 1)


def example(batch: int, length: int, heads: int, width: int) -> Streams:
    """Random streams with a decay a channel."""
    shape = (batch, length, heads, width)
    q, k = (F.normalize(torch.randn(shape), dim=-1) for _ in range(2))
    decay = -torch.exp(torch.randn(shape) - 2)
    return Streams(q, k, torch.randn(shape), decay)
