"""The oracle: every token's networks are picked, then run one by one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def naive_run(
    up: Tensor, down: Tensor, q: Tensor, weights: Tensor, indices: Tensor | None = None
) -> Tensor:
    """sum_i w_i gelu(q U_i) D_i; O(T S K E) memory."""
    batch, count, heads = up.shape[:3]
    if indices is None:
        indices = torch.arange(count, device=q.device).expand_as(weights)
    rows = torch.arange(batch, device=q.device)[:, None, None, None]
    some = torch.arange(heads, device=q.device)[None, None, :, None]
    live = (weights != 0)[..., None, None]
    first, second = (torch.where(live, w[rows, indices, some], 0) for w in (up, down))
    hidden = F.gelu(torch.einsum("bthk,bthske->bthse", q, first))
    return torch.einsum("bths,bthse,bthsev->bthv", weights, hidden, second)
