"""Deep linear attention: a network that follows `<M(k), v>` uphill (arXiv 2602.24281, eq 30-33)."""

from __future__ import annotations

from torch import Tensor

from mcretrofit.memories import Inner, Streams, mlp
from mcretrofit.ops._call import l2norm

NAMES = ("chunk_dla",)
MEMORY = mlp


def streams(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    start: tuple[Tensor, ...],
    g: Tensor | None = None,
    inner_chunk: int = 16,
    where: str = "dla",
    **_: object,
) -> Streams:
    """L2 norm of queries and keys inside; the step `eta` and the log keep gate `g` are `[B, T, H]`."""
    inner = Inner(mlp.begun(start, where), "dot", inner_chunk, where)
    return Streams(l2norm(q), l2norm(k), v, g, eta, inner=inner)
