"""Gated delta rule, as flash-linear-attention and transformers call it (arXiv 2412.06464)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mcretrofit.memories import Streams, delta
from mcretrofit.ops._call import grouped, l2norm, scaled

NAMES = (
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
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
    **_: object,
) -> Streams:
    """L2 norm, scale, gate `-exp(A_log) softplus(g + dt_bias)` and sigmoid of beta, each when asked."""
    if use_gate_in_kernel:
        g = -A_log.float().exp() * F.softplus(g.float() + dt_bias.float())
    if use_beta_sigmoid_in_kernel:
        beta = beta.float().sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    q, k = (l2norm(q), l2norm(k)) if use_qk_l2norm_in_kernel else (q, k)
    q, k = grouped(q, k, v)
    return Streams(scaled(q, scale), k, v, g, beta)
