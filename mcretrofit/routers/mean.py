"""Mean key of a segment: `r_i = <u_t, mean_j k_j>` (arXiv 2602.24281, eq 10 and 16; MATH 3.2 a-d)."""

from __future__ import annotations

import torch
from torch import Tensor

from mcretrofit.routers import Asked, Opened
from mcretrofit.segments import Bank

UNIT, USES_QUERY, POSITIVE, TEMPERATURE = True, True, False, 1.0


def width(keys: int) -> int:
    """The sum of the keys and their number."""
    return keys + 1


def summarise(keys: Tensor, valid: Tensor) -> Tensor:
    """`[B, S, C, H, K]` -> `[B, S, H, K + 1]`."""
    count = valid.sum(-1).to(keys.dtype)[..., None, None].expand(-1, -1, keys.shape[3], -1)
    return torch.cat([keys.sum(2), count], -1)


def score(asked: Asked, bank: Bank, opened: Opened | None) -> tuple[Tensor, Tensor | None]:
    """`<u_t, mean key>`, the open segment's mean up to and including each token."""
    mean = bank.summaries[..., :-1] / bank.summaries[..., -1:].clamp_min(1)
    cached = torch.einsum("bthk,bnhk->bthn", asked.u, mean)
    return cached, None if opened is None else _online(asked.u, opened)


def _online(u: Tensor, opened: Opened) -> Tensor:
    before = opened.before.flatten(0, 1)[:, None]
    total = before[..., :-1] + opened.fold(opened.keys).cumsum(1)
    count = before[..., -1] + opened.fold(opened.valid).cumsum(1)[..., None]
    return opened.unfold((opened.fold(u) * total).sum(-1) / count.clamp_min(1))
