"""The torch path of a cached read: tokens are grouped by state, one matrix product per group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# dense reads go block by block: a block's rows stay in the second-level cache across all states
BLOCK = 1024
# below these lengths reading the states as they lie beats building groups
FEW_DENSE, FEW_SPARSE = 32, 8
# BLAS sums a product of very few rows in another order; padding keeps a token's bits independent
# of how many other tokens chose its state (causality, bit for bit)
LEAST_ROWS = 16


class Group(NamedTuple):
    """The tokens of one sequence and head that read one state, each of them once."""

    batch: int
    head: int
    state: int
    slot: int  # where in the last dim of `weights` the group's weights are
    tokens: slice | Tensor

    def of(self, x: Tensor) -> Tensor:
        """The group's rows of x [B, T, H, ...]."""
        rows = x[self.batch, :, self.head]
        if isinstance(self.tokens, slice):
            return rows[self.tokens]
        return rows.index_select(0, self.tokens)

    def add(self, target: Tensor, w: Tensor, rows: Tensor) -> None:
        """target += w * rows at the group's rows of target [B, T, H, ...]."""
        target = target[self.batch, :, self.head]
        if isinstance(self.tokens, slice):
            target[self.tokens].addcmul_(rows, w)
        else:
            sums = target.index_select(0, self.tokens).addcmul_(rows, w)
            target.index_copy_(0, self.tokens, sums)


def grouped_read(
    states: Tensor, q: Tensor, weights: Tensor, indices: Tensor | None = None
) -> Tensor:
    """sum_i w_i q @ M_i for states [B, N, H, K, V], q [B, T, H, K]; never copies the bank."""
    return _Read.apply(states, q, weights, indices)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, q, weights, indices):
        ctx.save_for_backward(states, q, weights, indices)
        few = FEW_DENSE if indices is None else FEW_SPARSE
        read = _read_few if q.shape[1] <= few and states.shape[1] else _read_groups
        return read(states, q.to(states.dtype), weights.to(states.dtype), indices).to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # once: activation checkpointing recomputes what is saved when it is asked for
        states, q, weights, indices = ctx.saved_tensors
        with torch.autocast(states.device.type, enabled=False):
            grads = _backward(ctx, grad.to(states.dtype), (states, q, weights, indices))
        return *grads, None


def _backward(ctx, grad: Tensor, saved: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    states, given_q, given_weights, indices = saved
    q = given_q.to(states.dtype)
    to_states, to_rest = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])
    weights = given_weights.to(states.dtype)
    grad_states = states.new_zeros(states.shape) if to_states else None
    grad_q, grad_weights = torch.zeros_like(q), torch.zeros_like(weights)
    one = weights.new_ones(1)
    for group in _groups(weights, indices, states.shape[1]):
        b, h, n, slot, _ = group
        w, rows, g = group.of(weights[..., slot])[:, None], group.of(q), group.of(grad)
        if to_states:
            grad_states[b, n, h].addmm_((rows * w).mT, g)
        if to_rest:
            back = _product(g, states[b, n, h].mT)
            group.add(grad_q, w, back)
            group.add(grad_weights[..., slot], one, (back * rows).sum(-1))
    if not to_rest:
        return grad_states, None, None
    return grad_states, grad_q.to(given_q.dtype), grad_weights.to(given_weights.dtype)


def _read_groups(states: Tensor, q: Tensor, weights: Tensor, indices: Tensor | None) -> Tensor:
    y = q.new_zeros(*q.shape[:3], states.shape[4])
    for group in _groups(weights, indices, states.shape[1]):
        read = _product(group.of(q), states[group.batch, group.state, group.head])
        group.add(y, group.of(weights[..., group.slot])[:, None], read)
    return y


def _read_few(states: Tensor, q: Tensor, weights: Tensor, indices: Tensor | None) -> Tensor:
    """Decoding: all states (dense) or the picked ones (top-k) in one batched product a sequence."""
    y = q.new_empty(*q.shape[:3], states.shape[4])
    for b in range(q.shape[0]):
        if indices is None:
            reads = (q[b].transpose(0, 1) @ states[b]).permute(2, 1, 0, 3)
        else:
            reads = (q[b, :, :, None, None] @ _pick(states[b], indices[b])).squeeze(-2)
        w = weights[b, ..., None]
        y[b] = torch.where(w != 0, w * reads, 0).sum(-2)
    return y


def _pick(states: Tensor, indices: Tensor) -> Tensor:
    """states [N, H, K, V] at indices [T, H, S]: [T, H, S, K, V]."""
    heads = torch.arange(states.shape[1], device=states.device)[:, None]
    if states.stride(0) != states.shape[1] * states.stride(1):
        return states[indices, heads]
    # where (N, H) is one stride a state is one block to copy, five times faster than indexing
    owners = indices * states.shape[1] + heads
    picked = states.flatten(0, 1).index_select(0, owners.flatten())
    return picked.view(*indices.shape, *states.shape[2:])


def _groups(weights: Tensor, indices: Tensor | None, count: int) -> Iterator[Group]:
    for b in range(weights.shape[0]):
        for h in range(weights.shape[2]):
            live = weights[b, :, h] != 0
            if indices is None:
                yield from _dense_groups(b, h, live)
            else:
                yield from _sparse_groups(b, h, live, indices[b, :, h], count)


def _dense_groups(b: int, h: int, live: Tensor) -> Iterator[Group]:
    for start in range(0, len(live), BLOCK):
        block = live[start : start + BLOCK]
        for n, tokens in enumerate(block.sum(0).tolist()):
            if tokens == len(block):
                yield Group(b, h, n, n, slice(start, start + tokens))
            elif tokens:
                yield Group(b, h, n, n, block[:, n].nonzero()[:, 0] + start)


def _sparse_groups(b: int, h: int, live: Tensor, indices: Tensor, count: int) -> Iterator[Group]:
    slots = live.shape[1]
    pairs = live.flatten().nonzero()[:, 0]
    # one group per (slot, state): a token may name one state twice, but never in one slot
    owners = (indices + count * torch.arange(slots, device=live.device)).flatten()[pairs]
    owners, order = owners.sort(stable=True)
    owners, sizes = owners.unique_consecutive(return_counts=True)
    tokens = (pairs // max(slots, 1))[order].split(sizes.tolist())
    for owner, members in zip(owners.tolist(), tokens, strict=True):
        yield Group(b, h, owner % count, owner // count, members)


def _product(rows: Tensor, state: Tensor) -> Tensor:
    count = len(rows)
    if count >= LEAST_ROWS:
        return rows @ state
    return (F.pad(rows, (0, 0, 0, LEAST_ROWS - count)) @ state)[:count]
