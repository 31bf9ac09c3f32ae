"""The oracle of a cached read: every token's states are materialised, then one einsum."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_read(states: Tensor, q: Tensor, weights: Tensor, indices: Tensor | None = None) -> Tensor:
    """sum_i w_i q @ M_i for states [B, N, H, K, V], q [B, T, H, K]; O(T S K V) memory."""
    batch, count, heads = states.shape[:3]
    if indices is None:
        indices = torch.arange(count, device=q.device).expand_as(weights)
    rows = torch.arange(batch, device=q.device)[:, None, None, None]
    heads = torch.arange(heads, device=q.device)[None, None, :, None]
    picked = states[rows, indices, heads]
    picked = torch.where((weights != 0)[..., None, None], picked, 0)
    y = torch.einsum("bths,bthk,bthskv->bthv", weights.to(states.dtype), q.to(states.dtype), picked)
    return y.to(q.dtype)
