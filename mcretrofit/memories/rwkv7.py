"""RWKV-7 memory `S_t = diag(exp g_t) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T` (arXiv 2503.14456)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.memories import Streams
from mcretrofit.memories._decay import scores
from mcretrofit.memories._scan import kept, tile_size, tiles, untile

MERGES = False


def step(streams: Streams, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: what `a` recalls of the old state goes to `b`, then write and read."""
    q, k, v = (s[:, 0] for s in streams[:3])
    a, b = streams.a[:, 0], streams.b[:, 0]
    recalled = torch.einsum("bhk,bhkv->bhv", a, state)
    state = kept(state, streams.decay[:, 0]) + b[..., None] * recalled[..., None, :]
    state = state + k[..., None] * v[..., None, :]
    return torch.einsum("bhk,bhkv->bhv", q, state)[:, None], state


def chunks(streams: Streams, state: Tensor, every: int) -> tuple[Tensor, Tensor, Tensor]:
    """Many tokens by tiles: one unit triangular solve a tile gives all that `a` recalls."""
    size = tile_size(streams.length, every)
    q, k, v, a, b = (tiles(s, size) for s in (*streams[:3], streams.a, streams.b))
    log = tiles(streams.decay, size)
    at = log.cumsum(-2)
    before = at - log
    eye = torch.eye(size, dtype=k.dtype, device=k.device)
    moved = scores(a, b, before, at, strict=True)
    sides = torch.cat([scores(a, k, before, at, strict=True) @ v, a * before.exp()], -1)
    solved = torch.linalg.solve_triangular(eye - moved, sides, upper=False, unitriangular=True)
    fresh, carried = solved.split([v.shape[-1], k.shape[-1]], -1)
    by_b, by_k = (scores(q, s, at, at, strict=False) for s in (b, k))
    rest = (at[..., -1:, :] - at).exp()
    late_b, writes = b * rest, (k * rest).transpose(-1, -2) @ v
    inside, seen_q, total = by_k @ v, q * at.exp(), at[..., -1, :].exp()[..., None]
    outs, ends = [], []
    for i in range(q.shape[2]):
        recalled = fresh[:, :, i] + carried[:, :, i] @ state
        outs.append(seen_q[:, :, i] @ state + by_b[:, :, i] @ recalled)
        state = state * total[:, :, i] + late_b[:, :, i].transpose(-1, -2) @ recalled
        state = state + writes[:, :, i]
        if (i + 1) * size % every == 0:
            ends.append(state)
    return untile(inside + torch.stack(outs, 2)), state, torch.stack(ends, 1)


def example(batch: int, length: int, heads: int, width: int) -> Streams:
    """Random streams with removal along unit directions, as the family makes them."""
    shape = (batch, length, heads, width)
    q, k, v = (torch.randn(shape) * width**-0.5 for _ in range(3))
    unit, rate = F.normalize(torch.randn(shape), dim=-1), torch.rand(shape)
    decay = -0.606531 * torch.sigmoid(torch.randn(shape))
    return Streams(q, k, v, decay, None, -unit, unit * rate)
