"""Comba: a delta rule that recalls by `p` what it corrects, off the state before its decay.

`S_t = a_t S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T` (arXiv 2506.02475), a case of RWKV-7's rule.
"""

from __future__ import annotations

from torch import Tensor

from mcretrofit.memories import Streams, rwkv7
from mcretrofit.ops._call import grouped, l2norm, scaled

NAMES = ("chunk_comba", "fused_recurrent_comba")
MEMORY = rwkv7


def streams(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> Streams:
    """L2 norm of q, k and p (when asked) and scale inside; `g [B, T, H]` is in log space."""
    q, k, p = (l2norm(x) if use_qk_l2norm_in_kernel else x for x in (q, k, p))
    (q, k), (p, _) = grouped(q, k, v), grouped(p, k, v)
    write = k * beta[..., None].to(k)
    return Streams(scaled(q, scale), write, v, g, None, -p, write)
