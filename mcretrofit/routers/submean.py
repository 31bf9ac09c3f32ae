"""Mean keys of a segment's eighths: `r_i = max_p <u_t, mean_{j in part p} k_j>`.

Beyond the paper: a match is one key in 32 of a segment of 256, not one in 256, for a summary of eight
keys. Where segments are merged, so are their parts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.routers import Asked, Opened
from mcretrofit.segments import Bank

UNIT, USES_QUERY, POSITIVE, TEMPERATURE = True, True, False, 1.0
PARTS = 8


def width(keys: int) -> int:
    """The sum of the keys of every part, and their number."""
    return PARTS * (keys + 1)


def summarise(keys: Tensor, valid: Tensor, part: Tensor) -> Tensor:
    """`[B, S, C, H, K]` and the part `[B, S, C]` that holds each -> `[B, S, H, PARTS * (K + 1)]`."""
    counted, where = _counted(keys, valid, part)
    return torch.einsum("bschk,bscp->bshpk", counted, where).flatten(-2)


def score(asked: Asked, bank: Bank, opened: Opened | None) -> tuple[Tensor, Tensor | None]:
    """The best part's `<u_t, mean key>`, the open segment's parts up to and including each token."""
    mean, empty = _means(bank.summaries)
    each = torch.einsum("bthk,bnhpk->bthnp", asked.u, mean)
    cached = _best(each, empty.transpose(1, 2)[:, None])
    return cached, None if opened is None else _online(asked.u, opened)


def _online(u: Tensor, opened: Opened) -> Tensor:
    counted, where = _counted(*map(opened.fold, (opened.keys, opened.valid, opened.part)))
    written = counted[:, :, :, None] * where[:, :, None, :, None]
    mean, empty = _means(opened.before.flatten(0, 1)[:, None] + written.cumsum(1).flatten(-2))
    each = torch.einsum("bthk,bthpk->bthp", opened.fold(u), mean)
    return opened.unfold(_best(each, empty))


def _counted(keys: Tensor, valid: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """Keys with a one behind them, and to which part `[..., PARTS]` each valid one counts."""
    where = F.one_hot(part, PARTS).to(keys.dtype) * valid[..., None]
    return F.pad(keys, (0, 1), value=1.0), where


def _means(sums: Tensor) -> tuple[Tensor, Tensor]:
    sums = sums.unflatten(-1, (PARTS, -1))
    return sums[..., :-1] / sums[..., -1:].clamp_min(1), sums[..., -1] == 0


def _best(each: Tensor, empty: Tensor) -> Tensor:
    """The largest score of a part that holds a key; 0 where none does."""
    lowest = torch.finfo(each.dtype).min
    best = each.masked_fill(empty, lowest).amax(-1)
    return best.masked_fill(best == lowest, 0.0)
