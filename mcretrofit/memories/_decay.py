"""Decayed dot products inside a chunk, exact for any decay (no exponent above zero is ever taken)."""

from __future__ import annotations

import torch
from torch import Tensor


def scores(q: Tensor, k: Tensor, at_q: Tensor | None, at_k: Tensor | None, strict: bool) -> Tensor:
    """`P[t, j] = sum_c q[t, c] k[j, c] exp(at_q[t, c] - at_k[j, c])` for j <= t (j < t when strict).

    `q`, `k` are `[..., c, K]`, c a power of two; `at_q`, `at_k` the cumulative log decays
    `[..., c, 1]` or `[..., c, K]`.
    """
    diagonal = -1 if strict else 0
    if at_q is None or at_k is None:
        return (q @ k.transpose(-1, -2)).tril(diagonal)
    if at_q.shape[-1] == 1:
        return q @ k.transpose(-1, -2) * _weights(at_q - at_k.transpose(-1, -2), diagonal)
    return _by_halves(q, k, at_q, at_k, strict)


def _weights(exponent: Tensor, diagonal: int) -> Tensor:
    seen = torch.ones(exponent.shape[-2:], dtype=torch.bool, device=exponent.device).tril(diagonal)
    return exponent.masked_fill(~seen, float("-inf")).exp()


def _by_halves(q: Tensor, k: Tensor, at_q: Tensor, at_k: Tensor, strict: bool) -> Tensor:
    """Late queries on early keys, both measured from the middle; then each half the same way."""
    if q.shape[-2] == 1:
        same = (q * k).sum(-1, keepdim=True)
        return torch.zeros_like(same) if strict else same
    half = q.shape[-2] // 2
    middle = at_k[..., half - 1 : half, :]
    late = q[..., half:, :] * (at_q[..., half:, :] - middle).exp()
    early = k[..., :half, :] * (middle - at_k[..., :half, :]).exp()
    across = late @ early.transpose(-1, -2)
    first, second = _by_halves(
        *(x.unflatten(-2, (2, half)) for x in (q, k, at_q, at_k)), strict
    ).unbind(-3)
    top = torch.cat([first, torch.zeros_like(across)], -1)
    return torch.cat([top, torch.cat([across, second], -1)], -2)
