"""Delta rule `S_t = a_t S_{t-1} + k_t u_t^T`, `u_t = beta_t (v_t - (a_t S_{t-1})^T k_t)`.

Without decay DeltaNet (arXiv 2406.06484), with one decay a head Gated DeltaNet (2412.06464), with one
a channel the rule of Kimi Delta Attention (2510.26692).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.memories import Streams
from mcretrofit.memories._decay import scores
from mcretrofit.memories._scan import kept, tile_size, tiles, untile

MERGES = False  # what a segment erases depends on what was there


def step(streams: Streams, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: decay, replace what the key recalls, read."""
    q, k, v = (s[:, 0] for s in streams[:3])
    state = kept(state, None if streams.decay is None else streams.decay[:, 0])
    correction = (v - torch.einsum("bhk,bhkv->bhv", k, state)) * streams.beta[:, 0, :, None]
    state = state + k[..., None] * correction[..., None, :]
    return torch.einsum("bhk,bhkv->bhv", q, state)[:, None], state


def chunks(streams: Streams, state: Tensor, every: int) -> tuple[Tensor, Tensor, Tensor]:
    """Many tokens by tiles: one unit triangular solve a tile gives all corrections at once."""
    size = tile_size(streams.length, every)
    q, k, v = (tiles(s, size) for s in streams[:3])
    beta = tiles(streams.beta, size)
    at = None if streams.decay is None else tiles(streams.decay, size).cumsum(-2)
    seen_q, seen_k = (q, k) if at is None else (q * at.exp(), k * at.exp())
    recalled = scores(k, k, at, at, strict=True) * beta
    eye = torch.eye(size, dtype=k.dtype, device=k.device)
    sides = torch.cat([v * beta, seen_k * beta], -1)
    solved = torch.linalg.solve_triangular(eye + recalled, sides, upper=False, unitriangular=True)
    fresh, erased = solved.split([v.shape[-1], k.shape[-1]], -1)
    inside = scores(q, k, at, at, strict=False)
    if at is not None:
        k = k * (at[..., -1:, :] - at).exp()
        total = at[..., -1, :].exp()[..., None]
    outs, ends = [], []
    for i in range(q.shape[2]):
        correction = fresh[:, :, i] - erased[:, :, i] @ state
        outs.append(seen_q[:, :, i] @ state + inside[:, :, i] @ correction)
        state = state if at is None else state * total[:, :, i]
        state = state + k[:, :, i].transpose(-1, -2) @ correction
        if (i + 1) * size % every == 0:
            ends.append(state)
    return untile(torch.stack(outs, 2)), state, torch.stack(ends, 1)


def example(batch: int, length: int, heads: int, width: int, decay: str = "head") -> Streams:
    """Random streams; `decay` is `none`, `head` or `channel`."""
    shape = (batch, length, heads, width)
    q, k = (F.normalize(torch.randn(shape), dim=-1) for _ in range(2))
    drawn = {"none": None, "head": torch.randn(shape[:3]), "channel": torch.randn(shape)}[decay]
    log = None if drawn is None else F.logsigmoid(drawn) / 4
    return Streams(q, k, torch.randn(shape), log, torch.rand(shape[:3]))
