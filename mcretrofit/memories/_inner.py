"""The inner learner of deep memories: its network, its gradients, and what a chunk's steps add up to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcretrofit.memories import Streams


class _Gelu(torch.autograd.Function):
    """`gelu(h)` and its slope; by hand, as an inner chunk is a few small products and much of this."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> tuple[Tensor, Tensor]:
        below = torch.special.ndtr(h)
        density = (h.square() * -0.5).exp_().mul_(0.3989422804014327)
        slope = torch.addcmul(below, h, density)
        ctx.save_for_backward(h, density, slope)
        return h * below, slope

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_slope: Tensor) -> Tensor:
        h, density, slope = ctx.saved_tensors
        return torch.addcmul(grad * slope, grad_slope, density * (2 - h.square()))


def activated(h: Tensor) -> Tensor:
    """The exact GELU."""
    return F.gelu(h)


def normed(x: Tensor) -> Tensor:
    """Layer norm without weights."""
    return F.layer_norm(x, x.shape[-1:])


def forward(count: int, x: Tensor, layer: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The network of `count` weights, `layer(i, y)` being `y` times weight i.

    `x W`, or `x + gelu(x U) D`, or with a third weight g `x + (1 + g) norm(gelu(x U) D)` (TTT's).
    """
    first = layer(0, x)
    if count == 1:
        return first
    second = layer(1, activated(first))
    if count == 2:
        return x + second
    return x + normed(second) * (1 + layer(2, x.new_ones(*x.shape[:-1], 1)))


def network(weights: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """`forward` of `x [..., T, K]` through weights `[..., K, V]`."""
    return forward(len(weights), x, lambda i, y: y @ weights[i])


def gradients(
    weights: tuple[Tensor, ...], k: Tensor, v: Tensor, objective: str
) -> list[tuple[Tensor, Tensor]]:
    """`(z, r)` for every weight: the loss of token i has the gradient `z_i r_i^T`."""
    hidden = k @ weights[0]
    if len(weights) == 1:
        return [(k, -v if objective == "dot" else 2 * (hidden - v))]
    a, slope = _Gelu.apply(hidden)
    if len(weights) == 3:
        error, scaled = _through_norm(a @ weights[1], weights[2], k, v, objective)
    else:
        error = -v if objective == "dot" else 2 * (k + a @ weights[1] - v)
    pairs = [(k, error @ weights[1].transpose(-1, -2) * slope), (a, error)]
    return pairs if len(weights) == 2 else [*pairs, (k.new_ones(*k.shape[:-1], 1), scaled)]


def _through_norm(
    read: Tensor, scale: Tensor, k: Tensor, v: Tensor, objective: str
) -> tuple[Tensor, Tensor]:
    """The loss's gradients by what is normed and by the norm's scale, token by token."""
    unit = normed(read)
    error = -v if objective == "dot" else 2 * (k + unit * (1 + scale) - v)
    inner = error * (1 + scale)
    spread = torch.rsqrt(read.var(-1, keepdim=True, correction=0) + 1e-5)
    centred = inner - inner.mean(-1, keepdim=True)
    return (centred - unit * (inner * unit).mean(-1, keepdim=True)) * spread, error * unit


class Gates(NamedTuple):
    """The gates of all chunks `[n, G, b]`; `there` is 0 where no token is."""

    there: Tensor
    eta: Tensor
    decay: Tensor | None
    momentum: Tensor | None


class Steps(NamedTuple):
    """What the steps of one chunk leave of the weights W and momenta S before it, and add to them.

    After token t the weights are `kept_t W + drift_t S - sum_i inside_ti z_i r_i^T`.
    """

    kept: Tensor  # [G, b, 1]
    drift: Tensor | None  # [G, b, 1]
    inside: Tensor  # [G, b, b]
    last: Tensor  # [G, b, 1], the last row of `inside`
    total: Tensor | None  # [G, 1, 1], what is left of S at the end
    late: Tensor | None  # [G, b, 1], what each step adds to S


def steps(gates: Gates) -> list[Steps]:
    """The coefficients of every chunk."""
    there, eta, decay, momentum = gates
    keep = _between(torch.zeros_like(eta) if decay is None else decay)
    kept = torch.ones_like(eta) if decay is None else decay.cumsum(-1).exp()
    drift = total = late = None
    if momentum is None:
        inside = keep * eta[..., None, :]
    else:
        moved, last = _between(momentum), momentum.cumsum(-1)
        keep = keep * there[..., None, :]
        inside = keep @ moved * eta[..., None, :]
        drift = keep @ last.exp()[..., None]
        total, late = last[..., -1:, None].exp(), (moved[..., -1, :] * eta)[..., None]
    final = inside[..., -1, :, None]
    parts = (kept[..., None], drift, inside, final, total, late)
    each = ([None] * len(eta) if p is None else p.unbind(0) for p in parts)
    return [Steps(*one) for one in zip(*each, strict=True)]


def _between(log: Tensor) -> Tensor:
    """`exp(sum of log over i + 1 .. t)` for i <= t, else 0: `[..., b]` -> `[..., b, b]`."""
    at = log.cumsum(-1)
    seen = torch.ones(at.shape[-1], at.shape[-1], dtype=torch.bool, device=at.device).tril()
    return (at[..., :, None] - at[..., None, :]).masked_fill(~seen, float("-inf")).exp()


class Laid(NamedTuple):
    """Tokens in whole inner chunks of each row, and the ways there and back."""

    chunks: list[tuple[Tensor, Tensor, Tensor]]  # q, k, v [G, b, *] of each chunk
    gates: Gates
    live: list[Tensor | None]  # [G, 1, 1], rows that have a token here (None: all)
    counts: Tensor  # [B]
    lay: Callable[[Tensor], Tensor]  # [B, T, H, D] -> [n, G, b, D]
    take: Callable[[Tensor], Tensor]  # its inverse


def laid(streams: Streams, phase: Tensor) -> Laid:
    """Lay the tokens that are there behind the chunk under way, which holds `phase [B]` of them."""
    size, heads = streams.inner.chunk, streams.k.shape[2]
    there = streams.k.flatten(2).any(-1)
    before, counts = phase.long(), there.sum(1)
    width = max(size, -(-int((before + counts).max()) // size) * size)
    put, take = _places(there, before, width)

    def lay(x: Tensor) -> Tensor:
        x = put(x).unflatten(1, (-1, size))
        return x.movedim(3, 1).flatten(0, 1).transpose(0, 1).contiguous()

    def unlay(y: Tensor) -> Tensor:
        y = y.transpose(0, 1).unflatten(0, (-1, heads)).movedim(1, 3)
        return take(y.flatten(1, 2))

    q, k, v, decay, eta = (None if s is None else lay(s) for s in streams[:5])
    momentum = None if streams.momentum is None else lay(streams.momentum)
    here = lay(there.to(q.dtype)[..., None].expand(-1, -1, heads))
    decay, momentum = (None if s is None else s * here for s in (decay, momentum))
    live = [None if rows.all() else rows for rows in here.any(-1)[..., None, None]]
    chunks = list(zip(q.unbind(0), k.unbind(0), v.unbind(0), strict=True))
    gates = Gates(here, eta * here, decay, momentum)
    return Laid(chunks, gates, live, counts.to(phase.dtype), lay, unlay)


def _places(there: Tensor, before: Tensor, width: int) -> tuple[Callable, Callable]:
    first, length = int(before[0]), there.shape[1]
    if bool(there.all()) and bool((before == first).all()):
        tail = width - first - length

        def pad(x: Tensor) -> Tensor:
            return F.pad(x, (0,) * (2 * (x.dim() - 2)) + (first, tail)) if first or tail else x

        return pad, lambda y: y[:, first : first + length]
    rows = torch.arange(len(there), device=there.device)[:, None].expand_as(there)
    slots = before[:, None] + there.cumsum(1) - 1

    def put(x: Tensor) -> Tensor:
        out = x.new_zeros(x.shape[0], width, *x.shape[2:])
        return out.index_put((rows[there], slots[there]), x[there])

    def take(y: Tensor) -> Tensor:
        return y[rows, slots.clamp_min(0)] * there[..., None, None].to(y.dtype)

    return put, take
