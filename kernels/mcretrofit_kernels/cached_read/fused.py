"""The Triton path of a cached read, y_t = sum_i w_i q_t M_i, forward and backward."""

from __future__ import annotations

from math import prod

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from .fused_kernels import dense_read, sparse_read, sum_outer

# a launch with fewer programs than this splits the states among several of them
ENOUGH_PROGRAMS = 256


def fused_read(states: Tensor, q: Tensor, weights: Tensor, indices: Tensor | None = None) -> Tensor:
    """sum_i w_i q @ M_i for states [B, N, H, K, V] (any strides), q [B, T, H, K].

    All three gradients are kernels too. The states' one runs over the tokens of each state, so it
    is deterministic; the weights' one adds up over tiles of K atomically. An index out of range
    under a nonzero weight answers NaN.
    """
    if states.dtype != torch.float32:
        raise ValueError(f"impl 'triton' reads float32 states, not {states.dtype}")
    return _Read.apply(states, q, weights, indices)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, q, weights, indices):
        q, weights = q.contiguous(), weights.contiguous()
        indices = None if indices is None else indices.contiguous()
        ctx.save_for_backward(states, q, weights, indices)
        return _read(states, q, weights, indices).to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        states, q, weights, indices = ctx.saved_tensors
        grad, grad_states, grad_q, grad_weights = grad.contiguous(), None, None, None
        if any(ctx.needs_input_grad[1:3]):
            # grad_q is the same read through the transposed states; its unweighted terms,
            # multiplied with q, are the weights' gradient
            grad_weights = torch.zeros_like(weights, dtype=torch.float32)
            grad_q = _read(states.mT, grad, weights, indices, q, grad_weights).to(q.dtype)
            grad_weights = grad_weights.to(weights.dtype)
        if ctx.needs_input_grad[0]:
            grad_states = _grad_states(states.shape, q, weights, indices, grad)
        return grad_states, grad_q, grad_weights, None


def _read(
    states: Tensor,
    x: Tensor,
    weights: Tensor,
    indices: Tensor | None,
    other: Tensor | None = None,
    grad_weights: Tensor | None = None,
) -> Tensor:
    batch, count, heads, width, values = states.shape
    length, slots = weights.shape[1], weights.shape[3]
    tile_k, tile_v = _tile(width, 32), _tile(values, 64)
    sizes = (length, heads, count, slots, width, values)
    backward = other is not None
    # the kernels never touch these two outside a backward pass
    tail = (other, grad_weights) if backward else (x, x)
    columns = triton.cdiv(values, tile_v)
    if indices is not None:
        y = torch.empty(batch, length, heads, values, dtype=torch.float32, device=x.device)
        grid = (batch * length * heads, columns)
        tensors = (states, x, weights, indices, y, *tail)
        _launch(sparse_read, grid, *tensors, *states.stride(), *sizes, backward, tile_k, tile_v)
        return y
    tile_t = 64 if length > 32 else 16
    blocks = triton.cdiv(length, tile_t)
    spare = ENOUGH_PROGRAMS // max(1, blocks * columns * batch * heads)
    splits = max(1, min(count, spare))
    shape = (splits, batch, length, heads, values)
    y = torch.empty(shape, dtype=torch.float32, device=x.device)
    grid = (blocks * splits, columns, batch * heads)
    tensors, rest = (states, x, weights, y, *tail), (splits, _precision(), backward)
    _launch(dense_read, grid, *tensors, *states.stride(), *sizes, *rest, tile_t, tile_k, tile_v)
    return y.sum(0) if splits > 1 else y[0]


def _grad_states(
    shape: torch.Size, q: Tensor, weights: Tensor, indices: Tensor | None, grad: Tensor
) -> Tensor:
    batch, count, heads, width, values = shape
    sizes = (weights.shape[1], heads, count, weights.shape[3], width, values)
    out = torch.empty(shape, dtype=torch.float32, device=q.device)
    tile_k, tile_v = _tile(width, 64), _tile(values, 64)
    grid = (count * triton.cdiv(width, tile_k), triton.cdiv(values, tile_v), batch * heads)
    sparse = indices is not None
    tensors = (q, weights, indices if sparse else weights, grad, out)
    _launch(sum_outer, grid, *tensors, *sizes, _precision(), sparse, 32, tile_k, tile_v)
    return out


def _tile(size: int, most: int) -> int:
    return min(most, max(16, triton.next_power_of_2(size)))


def _precision() -> str:
    """tf32 products only where torch's own setting allows them."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _launch(kernel, grid: tuple[int, ...], *arguments) -> None:
    if prod(grid):
        # triton launches on the current device, which need not be the tensors'
        with torch.cuda.device_of(arguments[0]):
            kernel[grid](*arguments)
