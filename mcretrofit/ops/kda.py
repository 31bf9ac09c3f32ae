"""Kimi Delta Attention: the gated delta rule with a decay a key channel (arXiv 2510.26692)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.memories import Streams, delta
from mcretrofit.ops._call import grouped, l2norm, scaled

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
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,  # noqa: N803 - the hosts' name
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    **_: object,
) -> Streams:
    """L2 norm, scale, gate and sigmoid of beta, each when asked; `g` is `[B, T, H, K]`."""
    if use_gate_in_kernel:
        g = _gate(g.float(), A_log, dt_bias, lower_bound)
    if use_beta_sigmoid_in_kernel:
        beta = beta.float().sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    q, k = (l2norm(q), l2norm(k)) if use_qk_l2norm_in_kernel else (q, k)
    q, k = grouped(q, k, v)
    return Streams(scaled(q, scale), k, v, g, beta)


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
