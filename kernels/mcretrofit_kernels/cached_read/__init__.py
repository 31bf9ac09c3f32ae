"""Read a bank of cached states: y_t = sum_i w_i q_t M_i, arXiv 2602.24281 eq 9 and 17."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from .grouped import grouped_read
from .naive import naive_read

__all__ = ["IMPLS", "cached_read"]

IMPLS = ("auto", "naive", "torch", "triton")


def cached_read(
    states: Tensor,
    q: Tensor,
    weights: Tensor,
    indices: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Weighted reads of cached states, y[b,t,h] = sum_i w_i q[b,t,h] @ states[b,i,h].

    states [B, N, H, K, V] float32, any strides; q [B, T, H, K]; returns [B, T, H, V] in q's dtype,
    computed in float32 (float64 when the states are). Dense: `weights` [B, T, H, N]. Top-k:
    `weights` and int64 `indices` into N, both [B, T, H, S].

    A weight of exactly 0 means "not selected": nothing flows through it, neither a NaN of its
    state nor a gradient, not even to the weight itself. Gradients reach states, q and weights;
    until backward has run, the bank must not be written to.

    impl: "naive" (the oracle), "torch" (grouped products), "triton" (fused) or "auto", which takes
    triton on CUDA where it is installed and torch elsewhere. A named impl is never replaced.
    Raises ValueError for shapes, dtypes and indices that do not fit, RuntimeError for an impl that
    cannot run here.
    """
    _check(states, q, weights, indices)
    read = _resolve(impl, states)
    # autocast would take the products to half precision; states are float32 by contract
    with torch.autocast(states.device.type, enabled=False):
        return read(states, q, weights, indices)


def _resolve(impl: str, states: Tensor):
    if impl not in IMPLS:
        raise ValueError(f"unknown impl {impl!r} for cached_read (known: {', '.join(IMPLS)})")
    if impl == "auto":
        impl = "triton" if states.is_cuda and find_spec("triton") else "torch"
    if impl != "triton":
        return {"naive": naive_read, "torch": grouped_read}[impl]
    if not find_spec("triton"):
        raise RuntimeError("impl 'triton' needs triton: install it, or pass impl='torch'")
    if not states.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            f"impl 'triton' cannot run on a {states.device.type} tensor: move it to CUDA, pass "
            "impl='torch', or set TRITON_INTERPRET=1 before starting Python (slow, for tests)"
        )
    from .fused import fused_read

    return fused_read


def _check(states: Tensor, q: Tensor, weights: Tensor, indices: Tensor | None) -> None:
    if states.dim() != 5 or q.dim() != 4 or weights.dim() != 4:
        raise ValueError(
            "cached_read takes states [B, N, H, K, V], q [B, T, H, K], weights [B, T, H, N or S]; "
            f"got {[*states.shape]}, {[*q.shape]}, {[*weights.shape]}"
        )
    batch, count, heads, width, _ = states.shape
    if (q.shape[0], *q.shape[2:]) != (batch, heads, width):
        raise ValueError(f"q {[*q.shape]} does not fit states {[*states.shape]}")
    if states.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"cached states must be float32, not {states.dtype}")
    expected = (*q.shape[:3], count if indices is None else weights.shape[3])
    if weights.shape != expected:
        raise ValueError(f"weights {[*weights.shape]} should be {[*expected]}")
    if indices is None:
        return
    if indices.shape != weights.shape or indices.dtype != torch.int64:
        raise ValueError(
            f"indices must be int64 {[*weights.shape]}, not {indices.dtype} {[*indices.shape]}"
        )
    # on an accelerator this check would wait for the device; the kernel answers NaN there
    if indices.device.type == "cpu" and indices.numel():
        low, high = indices.aminmax()
        if low < 0 or high >= count:
            raise ValueError(f"indices run from {low} to {high}, but there are {count} states")
