"""The rarest keys of a segment: `s_i = max_j cos(u, k_j)^2` over `KEPT` whitened keys, the longest.

Beyond the paper. A second moment adds up what every key matches a little, so that a segment full of
facts of one form hides the one that is asked for; the best match of a single key does not. Keys that
any text holds are short under `E[k k^T]^-1/2`, those of names and numbers are long: few of them are
enough. They are compared by direction: a long key would match whatever is asked. Of keys of one
length, as all are without whitening, the first ones are kept.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.routers import Asked, Opened
from mcretrofit.segments import Bank

UNIT, USES_QUERY, POSITIVE, TEMPERATURE = True, True, True, 10.0
WHITENS, PLACES, ADDS = True, True, False
LOUD = (0.05, 0.02, 0.005, 0.001)  # a match stands out more than a sum does
BESIDE = ("moment", "energy")
KEPT = 32
TOKENS = 256  # whose matches with all kept keys exist at a time
STEPS = 1e4  # lengths are kept in so many parts of one: the same in whatever pieces they come


def width(keys: int) -> int:
    """The kept keys with the length and the place of each."""
    return KEPT * (keys + 2)


def summarise(keys: Tensor, valid: Tensor, part: Tensor) -> Tensor:
    """`[B, S, C, H, K]` and places in the segment `[B, S, C]` -> `[B, S, H, KEPT * (K + 2)]`."""
    return _rarest(_marked(keys, valid, part).transpose(2, 3)).flatten(-2)


def merge(before: Tensor, after: Tensor) -> Tensor:
    """Of two summaries `[..., P]` that of both."""
    return _rarest(torch.cat([_rows(before), _rows(after)], -2)).flatten(-2)


def score(asked: Asked, bank: Bank, opened: Opened | None) -> tuple[Tensor, Tensor | None]:
    """The best match among a segment's kept keys; of the open segment those up to each token."""
    match = _match_one if asked.u.shape[1] == 1 else _match_many
    best = match(asked.u, bank.summaries)
    return best, None if opened is None else _online(asked.u, opened)


def _match_one(u: Tensor, summaries: Tensor) -> Tensor:
    """The best matches `[B, 1, H, N]` of one token.

    Every key meets every head's question, in one product that copies no key.
    """
    # what is asked of lengths and places is nothing
    asked = F.pad(u[:, 0], (0, 2)).transpose(1, 2)
    best = []
    for kept, questions in zip(_rows(summaries), asked, strict=True):
        matches = kept.flatten(0, 2) @ questions
        own = matches.unflatten(0, kept.shape[:3]).diagonal(dim1=1, dim2=3)
        best.append(own.square().amax(1).transpose(0, 1))
    return torch.stack(best)[:, None]


def _match_many(u: Tensor, summaries: Tensor) -> Tensor:
    """The best matches `[B, T, H, N]`, one product a head."""
    columns = []
    for h in range(u.shape[2]):
        own = _rows(summaries[:, :, h])[..., :-2]
        flat = own.flatten(1, 2).transpose(1, 2)
        best = [
            (some @ flat).square().unflatten(-1, own.shape[1:3]).amax(-1)
            for some in u[:, :, h].split(TOKENS, 1)
        ]
        columns.append(torch.cat(best, 1))
    return torch.stack(columns, 2)


def settled(u: Tensor, opened: Opened) -> Tensor:
    """The best match among the kept keys of the open segment up to `lag` tokens before each token."""
    return _online(u, opened, opened.lag)


def _online(u: Tensor, opened: Opened, lag: int = 0) -> Tensor:
    keys, valid, part = map(opened.fold, (opened.keys, opened.valid, opened.part))
    own = _marked(keys, valid, part).transpose(1, 2)
    rows = torch.cat([_rows(opened.before.flatten(0, 1)), own], -2)
    until, mark = _until(rows, own.shape[-2]), rows[..., -1]
    steps = torch.arange(own.shape[-2], device=u.device)[:, None]
    # marks count from 1: the key of the token's own place is `lag` 0
    far = mark[:, :, None] <= (part + 1 - lag)[:, None, :, None].to(mark.dtype)
    seen = far & (mark > 0)[:, :, None] & (steps < until[:, :, None])
    matches = opened.fold(u).transpose(1, 2) @ rows[..., :-2].transpose(-1, -2)
    return opened.unfold((matches.square() * seen).amax(-1).transpose(1, 2))


def _until(rows: Tensor, count: int) -> Tensor:
    """The step `[X, H, R]` at which each key has `KEPT` rarer ones before it, `count` where none.

    The last `count` of `rows [X, H, R, K + 2]` come a step each, the others were there.
    """
    length = rows[..., -2]
    there = rows.shape[-2] - count
    if there + count <= KEPT:
        return torch.full_like(length, count)
    order = torch.arange(rows.shape[-2], device=rows.device)
    one, other = length[..., :, None], length[..., None, :]
    rarer = (one > other) | ((one == other) & (order[:, None] < order))
    rarer = (rarer & (rows[..., -1] > 0)[..., None]).to(torch.int32)
    before = rarer[..., :there, :].sum(-2, keepdim=True)
    return ((before + rarer[..., there:, :].cumsum(-2)) < KEPT).sum(-2)


def _marked(keys: Tensor, valid: Tensor, part: Tensor) -> Tensor:
    """Unit keys `[..., C, H, K]` with their lengths and their places from 1, zeros for no key."""
    length = (keys.norm(dim=-1, keepdim=True) * STEPS).round()
    place = ((part + 1) * valid).to(keys.dtype)[..., None, None].expand_as(length)
    return torch.cat([F.normalize(keys, dim=-1), length, place], -1) * (place > 0)


def _rows(summaries: Tensor) -> Tensor:
    return summaries.unflatten(-1, (KEPT, -1))


def _rarest(rows: Tensor) -> Tensor:
    """`[..., R, K + 2]` -> the rarest `[..., KEPT, K + 2]`, those of one length in their order."""
    if rows.shape[-2] <= KEPT:
        return F.pad(rows, (0, 0, 0, KEPT - rows.shape[-2]))
    length = torch.where(rows[..., -1] > 0, rows[..., -2], -1)
    order = length.sort(dim=-1, descending=True, stable=True).indices[..., :KEPT]
    return rows.gather(-2, order[..., None].expand(*order.shape, rows.shape[-1]))
