"""The delta rule by steps and by tiles, for every memory that writes with it."""

from __future__ import annotations

import torch
from torch import Tensor

from mcretrofit.memories import Streams
from mcretrofit.memories._decay import scores
from mcretrofit.memories._scan import kept, tile_size, tiles, untile


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
