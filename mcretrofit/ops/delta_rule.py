"""Delta rule (`fla.ops.delta_rule`, arXiv 2406.06484)."""

from __future__ import annotations

from torch import Tensor

from mcretrofit.memories import Streams, delta
from mcretrofit.ops._call import l2norm, scaled

NAMES = ("chunk_delta_rule", "fused_recurrent_delta_rule")
MEMORY = delta


def streams(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> Streams:
    """L2 norm of queries and keys (when asked) and scale inside."""
    q, k = (l2norm(q), l2norm(k)) if use_qk_l2norm_in_kernel else (q, k)
    return Streams(scaled(q, scale), k, v, None, beta)
