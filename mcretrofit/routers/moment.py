"""Second moment of a segment's keys: `s_i = u^T G_i u`, `G_i = sum_j k_j k_j^T` = sum of `(u . k_j)^2`.

Beyond the paper. With unit keys a match adds 1 and n others n / K on average. `G` is symmetric: only
blocks on and above the diagonal are kept, those above it doubled.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mcretrofit.routers import Asked, Opened
from mcretrofit.segments import Bank

UNIT, USES_QUERY, POSITIVE, TEMPERATURE = True, True, True, 10.0
BESIDE = ("energy",)
BLOCK = 16
TOKENS = 128  # packed queries that exist at a time: as many as stay in a core's cache


def width(keys: int) -> int:
    """Floats a segment and head."""
    return sum(min(BLOCK, keys - i) * (keys - i) for i in range(0, keys, BLOCK))


def packed(u: Tensor, into: Tensor | None = None) -> Tensor:
    """The kept blocks of `u u^T`, flat: `[..., K]` -> `[..., P]`, written over `into [..., P]`."""
    if into is None:
        return torch.cat([(a * b).flatten(-2) for a, b in _blocks(u)], -1)
    start = 0
    for a, b in _blocks(u):
        shape = (a.shape[-2], b.shape[-1])
        stop = start + shape[0] * shape[1]
        torch.mul(a, b, out=into[..., start:stop].unflatten(-1, shape))
        start = stop
    return into


def _blocks(u: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for i in range(0, u.shape[-1], BLOCK):
        yield u[..., i : i + BLOCK, None], u[..., None, i:]


def summarise(keys: Tensor, valid: Tensor) -> Tensor:
    """`[B, S, C, H, K]` -> `[B, S, H, P]`."""
    keys = keys.transpose(2, 3)
    moment = keys.transpose(-1, -2) @ keys
    parts = []
    for i in range(0, keys.shape[-1], BLOCK):
        block = moment[..., i : i + BLOCK, i:]
        square, beside = block.split([block.shape[-2], block.shape[-1] - block.shape[-2]], -1)
        parts.append(torch.cat([square, 2 * beside], -1).flatten(-2))
    return torch.cat(parts, -1)


def score(asked: Asked, bank: Bank, opened: Opened | None) -> tuple[Tensor, Tensor | None]:
    """`u^T G_i u`, and the running sum of `(u_t . k_j)^2` over the open segment."""
    columns, scratch = [], None
    if not asked.u.requires_grad:  # no new memory for every tile: half of the time
        batch, tokens = len(asked.u), min(TOKENS, asked.u.shape[1])
        scratch = asked.u.new_empty(batch, tokens, width(asked.u.shape[-1]))
    for h in range(asked.u.shape[2]):
        kept = bank.summaries[:, :, h].transpose(1, 2)
        rows = [
            packed(u, None if scratch is None else scratch[:, : u.shape[1]]) @ kept
            for u in asked.u[:, :, h].split(TOKENS, 1)
        ]
        columns.append(torch.cat(rows, 1))
    return torch.stack(columns, 2), None if opened is None else _online(asked.u, opened)


def settled(u: Tensor, opened: Opened) -> Tensor:
    """The running sum up to `lag` tokens before each token."""
    lag = opened.lag
    far = _online(u, opened, lag)
    if opened.near is None or not opened.near.any():
        return far
    steps = torch.arange(opened.size, device=u.device) - opened.begun[:, None]
    gap = steps[..., None] + lag - torch.arange(lag, device=u.device)
    first = u[:, : opened.size]
    inside = torch.einsum("bthk,bjhk->bthj", first, opened.near).square()
    close = (inside * (gap < lag)[:, :, None]).sum(-1)
    return torch.cat([far[:, : opened.size] - close, far[:, opened.size :]], 1)


def _online(u: Tensor, opened: Opened, lag: int = 0) -> Tensor:
    u = opened.fold(u).transpose(1, 2)
    if lag >= opened.size:
        inside = u.new_zeros(u.shape[:-1])
    else:
        keys = opened.fold(opened.keys).permute(0, 2, 3, 1)
        inside = (u @ keys).square().tril(-lag).sum(-1)
    if opened.before.any():
        inside = inside + (packed(u) * opened.before.flatten(0, 1)[:, :, None]).sum(-1)
    return opened.unfold(inside.transpose(1, 2))
