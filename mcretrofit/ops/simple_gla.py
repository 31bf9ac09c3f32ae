"""Simple gated linear attention: one log decay a head (`fla.ops.simple_gla`)."""

from __future__ import annotations

from torch import Tensor

from mcretrofit.memories import Streams, linear
from mcretrofit.ops._call import scaled

NAMES = ("chunk_simple_gla", "fused_recurrent_simple_gla")
MEMORY = linear


def streams(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    **_: object,
) -> Streams:
    """Scale inside; `g` is `[B, T, H]` in log space."""
    return Streams(scaled(q, scale), k, v, g)
