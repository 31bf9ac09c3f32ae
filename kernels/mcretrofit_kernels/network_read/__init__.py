"""Run a bank of cached two-layer networks: y_t = sum_i w_i gelu(q_t U_i) D_i (arXiv 2602.24281, eq 9)."""

from __future__ import annotations

import torch
from torch import Tensor

from .grouped import grouped_run
from .naive import naive_run

__all__ = ["IMPLS", "network_read"]

IMPLS = ("naive", "torch")


def network_read(
    up: Tensor,
    down: Tensor,
    q: Tensor,
    weights: Tensor,
    indices: Tensor | None = None,
    *,
    impl: str = "torch",
) -> Tensor:
    """Weighted outputs of cached networks, their skip connection left out: `[B, T, H, V]`.

    up [B, N, H, K, E] and down [B, N, H, E, V] float32, any strides; q [B, T, H, K]. Dense: `weights`
    [B, T, H, N]. Top-k: `weights` and int64 `indices` into N, both [B, T, H, S]. A weight of exactly
    0 means "not selected": nothing flows through it. Raises ValueError for shapes that do not fit.
    """
    if impl not in IMPLS:
        raise ValueError(f"unknown impl {impl!r} for network_read (known: {', '.join(IMPLS)})")
    batch, count, heads, width, hidden = up.shape
    if down.shape[:4] != (batch, count, heads, hidden):
        raise ValueError(f"down {[*down.shape]} does not fit up {[*up.shape]}")
    if (q.shape[0], *q.shape[2:]) != (batch, heads, width):
        raise ValueError(f"q {[*q.shape]} does not fit networks {[*up.shape]}")
    expected = (*q.shape[:3], count if indices is None else weights.shape[3])
    if weights.shape != expected or (indices is not None and indices.shape != expected):
        raise ValueError(f"weights {[*weights.shape]} should be {[*expected]}")
    run = {"naive": naive_run, "torch": grouped_run}[impl]
    with torch.autocast(up.device.type, enabled=False):
        given = q.to(up.dtype), weights.to(up.dtype)
        return run(up, down, *given, indices).to(q.dtype)
