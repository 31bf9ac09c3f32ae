"""Linear memory `S_t = diag(exp g_t) S_{t-1} + k_t v_t^T`, read `q_t S_t` (arXiv 2602.24281, eq 12).

Without decay (linear attention), with one decay a head (retention, simple GLA) or a channel (GLA).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.memories import Streams
from mcretrofit.memories._decay import scores
from mcretrofit.memories._scan import kept, tile_size, tiles, untile

MERGES = True  # two neighbouring segments' own writes add up to the state of both


def step(streams: Streams, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: decay, write, read."""
    q, k, v = (s[:, 0] for s in streams[:3])
    state = kept(state, None if streams.decay is None else streams.decay[:, 0])
    state = state + k[..., None] * v[..., None, :]
    return torch.einsum("bhk,bhkv->bhv", q, state)[:, None], state


def chunks(streams: Streams, state: Tensor, every: int) -> tuple[Tensor, Tensor, Tensor]:
    """Many tokens by tiles: inside a tile a masked product, between tiles the state."""
    size = tile_size(streams.length, every)
    q, k, v = (tiles(s, size) for s in streams[:3])
    at = None if streams.decay is None else tiles(streams.decay, size).cumsum(-2)
    inside = scores(q, k, at, at, strict=False) @ v
    if at is not None:
        q, k = q * at.exp(), k * (at[..., -1:, :] - at).exp()
        total = at[..., -1, :].exp()[..., None]
    writes = k.transpose(-1, -2) @ v
    outs, ends = [], []
    for i in range(q.shape[2]):
        outs.append(q[:, :, i] @ state)
        state = writes[:, :, i] + (state if at is None else state * total[:, :, i])
        if (i + 1) * size % every == 0:
            ends.append(state)
    return untile(inside + torch.stack(outs, 2)), state, torch.stack(ends, 1)


def example(batch: int, length: int, heads: int, width: int, decay: str = "channel") -> Streams:
    """Random streams; `decay` is `none`, `head` or `channel`."""
    shape = (batch, length, heads, width)
    q, k = (F.normalize(torch.randn(shape), dim=-1) for _ in range(2))
    drawn = {"none": None, "head": torch.randn(shape[:3]), "channel": torch.randn(shape)}[decay]
    return Streams(q, k, torch.randn(shape), None if drawn is None else F.logsigmoid(drawn) / 4)
