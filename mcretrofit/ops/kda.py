"""Kimi Delta Attention: the gated delta rule with a decay a key channel (arXiv 2510.26692)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.memories import Streams, delta
from mcretrofit.ops._call import delta_streams

NAMES = (
    "chunk_kda",
    "fused_recurrent_kda",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
)
MEMORY = delta


def streams(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,  # noqa: N803 - the hosts' name
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    **options,  # noqa: ANN003 - as `delta_streams` takes them
) -> Streams:
    """L2 norm, scale, gate and sigmoid of beta, each when asked; `g` is `[B, T, H, K]`."""
    if use_gate_in_kernel:
        g = _gate(g.float(), A_log, dt_bias, lower_bound)
    return delta_streams(q, k, v, g, beta, **options)


def _gate(
    g: Tensor,
    A_log: Tensor | None,  # noqa: N803
    dt_bias: Tensor | None,
    lower_bound: float | None,
) -> Tensor:
    """`-exp(A_log) softplus(g + bias)`; with a lower bound `bound sigmoid(exp(A_log) (g + bias))`."""
    g = g if dt_bias is None else g + dt_bias.float().view(g.shape[-2:])
    rate = g.new_ones(1) if A_log is None else A_log.float().exp().view(-1, 1)
    if lower_bound is None:
        return -rate * F.softplus(g)
    return lower_bound * torch.sigmoid(rate * g)
