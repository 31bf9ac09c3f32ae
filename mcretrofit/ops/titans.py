"""Titans' memory: gradient descent with momentum on `|M(k) - v|^2` (arXiv 2602.24281, eq 34-36).

With the sign of arXiv 2501.00663: what the former prints climbs.
"""

from __future__ import annotations

from torch import Tensor

from mcretrofit.memories import Inner, Streams, mlp
from mcretrofit.ops._call import l2norm

NAMES = ("chunk_titans",)
MEMORY = mlp


def streams(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    momentum: Tensor,
    eta: Tensor,
    start: tuple[Tensor, ...],
    inner_chunk: int = 16,
    where: str = "titans",
    **_: object,
) -> Streams:
    """L2 norm of queries and keys inside; keep `g` and `momentum` in log space and the step `eta` are
    `[B, T, H]`."""
    inner = Inner(mlp.begun(start, where), "l2", inner_chunk, where)
    return Streams(l2norm(q), l2norm(k), v, g, eta, momentum=momentum, inner=inner)
