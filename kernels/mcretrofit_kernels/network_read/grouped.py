"""Cached networks by groups: the tokens that read one network go through it together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit_kernels.cached_read.grouped import FEW_DENSE, FEW_SPARSE, _groups, _pick, _product


def grouped_run(
    up: Tensor, down: Tensor, q: Tensor, weights: Tensor, indices: Tensor | None = None
) -> Tensor:
    """sum_i w_i gelu(q U_i) D_i; never copies the bank but for a few tokens' top k."""
    if not up.shape[1] or not weights.shape[3]:
        return q.new_zeros(*q.shape[:3], down.shape[4])
    if q.shape[1] <= (FEW_DENSE if indices is None else FEW_SPARSE):
        return torch.stack(
            [
                _few(up[b], down[b], q[b], weights[b], None if indices is None else indices[b])
                for b in range(len(q))
            ]
        )
    y = q.new_zeros(*q.shape[:3], down.shape[4])
    for group in _groups(weights, indices, up.shape[1]):
        b, h, n, slot, tokens = group
        hidden = F.gelu(_product(group.of(q), up[b, n, h]))
        out = _product(hidden, down[b, n, h]) * group.of(weights[..., slot])[:, None]
        places = torch.arange(len(y[b]), device=y.device)[tokens]
        y = y.index_put((torch.full_like(places, b), places, torch.full_like(places, h)), out, True)
    return y


def _few(up: Tensor, down: Tensor, q: Tensor, weights: Tensor, indices: Tensor | None) -> Tensor:
    """One sequence of a few tokens: `[T, H, V]`."""
    if indices is None:
        out = (F.gelu(q.transpose(0, 1) @ up) @ down).permute(2, 1, 0, 3)
    else:
        hidden = F.gelu(q[:, :, None, None] @ _pick(up, indices))
        out = (hidden @ _pick(down, indices)).squeeze(-2)
    return torch.where(weights[..., None] != 0, weights[..., None] * out, 0).sum(-2)
