"""Gated delta rule, as flash-linear-attention and transformers call it (arXiv 2412.06464)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mcretrofit.memories import Streams, delta
from mcretrofit.ops._call import delta_streams

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
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,  # noqa: N803 - the hosts' name
    dt_bias: Tensor | None = None,
    **options,  # noqa: ANN003 - as `delta_streams` takes them
) -> Streams:
    """L2 norm, scale, gate `-exp(A_log) softplus(g + dt_bias)` and sigmoid of beta, each when asked."""
    if use_gate_in_kernel:
        g = -A_log.float().exp() * F.softplus(g.float() + dt_bias.float())
    return delta_streams(q, k, v, g, beta, **options)
