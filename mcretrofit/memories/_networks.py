"""Reads of many cached networks: their outputs mixed (GRM), or their weights (Memory Soup).

`M(x) = x + g(x)` has its skip once, however many memories are read: where the weights sum to one, as a
softmax's do, that is the same (arXiv 2602.24281, eq 9 and 15).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from mcretrofit_kernels.cached_read import cached_read
from mcretrofit_kernels.network_read import network_read
from torch import Tensor

from mcretrofit.memories._inner import forward, network
from mcretrofit.memories._scan import State

Networks = tuple[Tensor, ...]  # [B, N, H, *, *] a layer
Layer = Callable[[int, Tensor], Tensor]  # (layer, x [B, T, H, *]) -> x_t W_t of the open segment


def separate(
    cached: State, online: Tensor, own: Tensor, q: Tensor, w: Tensor, at: Tensor | None = None
) -> Tensor:
    """GRM: `online [B, T, H, V]` times `own [B, T, H]`, and every cached matrix's or network's read."""
    own, cached = own[..., None], _layers(cached)
    if len(cached) == 1:
        return own * online + cached_read(cached[0], q, w, at)
    run = network_read if len(cached) == 2 else _one_by_one
    return q + own * (online - q) + run(*cached, q, w, at)


def _one_by_one(up: Tensor, down: Tensor, scale: Tensor, q: Tensor, w: Tensor, at: Tensor | None):
    """Networks with a norm inside, each run for all tokens."""
    if at is not None:
        w = w.new_zeros(*w.shape[:3], up.shape[1]).scatter_add(-1, at, w)
    x, total = q.transpose(1, 2), 0
    for n in range(up.shape[1]):
        out = network((up[:, n], down[:, n], scale[:, n]), x) - x
        weight = w[..., n].transpose(1, 2)[..., None]
        total = total + torch.where(weight != 0, weight * out, 0)
    return q * 0 if isinstance(total, int) else total.transpose(1, 2)


def blended(
    cached: Networks, online: Layer, own: Tensor, q: Tensor, w: Tensor, at: Tensor | None = None
) -> Tensor:
    """Soup: `gelu` once, on what the first layers of all memories give together."""
    own = own[..., None]

    def mixed(layer: int, x: Tensor) -> Tensor:
        return own * online(layer, x) + cached_read(cached[layer], x, w, at)

    return forward(len(cached), q, mixed)


def running(weights: Networks) -> Layer:
    """The layers of networks `[B, H, *, *]` that stay the same for all tokens."""

    def read(layer: int, x: Tensor) -> Tensor:
        return torch.einsum("bthk,bhkv->bthv", x, weights[layer])

    return read


def gains(states: State, q: Tensor) -> Iterator[Tensor]:
    """What each cached matrix or network gives for `q [B, T, H, K]`, without its skip."""
    x, layers = q.transpose(1, 2).to(_layers(states)[0].dtype), _layers(states)
    for n in range(layers[0].shape[1]):
        read = network(tuple(w[:, n] for w in layers), x).transpose(1, 2)
        yield gain(states, read, q)


def gain(states: State, read: Tensor, q: Tensor) -> Tensor:
    """A read `[B, T, H, V]` of such states without the query that networks hand through."""
    return read if len(_layers(states)) == 1 else read - q


def _layers(states: State) -> Networks:
    return (states,) if isinstance(states, Tensor) else states


def packed(weights: State) -> Tensor:
    """The weights of a network as one tensor `[..., P]`, which a bank keeps like any state."""
    if isinstance(weights, Tensor):
        return weights
    return torch.cat([w.flatten(-2) for w in weights], -1)


def unpacked(states: Tensor, like: State) -> State:
    """The weights of packed networks as views, in the shapes of `like [..., *, *]`."""
    if isinstance(like, Tensor):
        return states
    sizes = [w.shape[-2:] for w in like]
    parts = states.split([a * b for a, b in sizes], -1)
    return tuple(p.unflatten(-1, size) for p, size in zip(parts, sizes, strict=True))
