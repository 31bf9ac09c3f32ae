"""Gated linear attention: a log decay a key channel (`fla.ops.gla`, arXiv 2312.06635)."""

from __future__ import annotations

from torch import Tensor

from mcretrofit.memories import Streams, linear
from mcretrofit.ops._call import scaled

NAMES = ("chunk_gla", "fused_chunk_gla", "fused_recurrent_gla")
MEMORY = linear


def streams(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    scale: float | None = None,
    **_: object,
) -> Streams:
    """Scale inside; the gate is `g` for the chunk op and `gk` for the recurrent one."""
    return Streams(scaled(q, scale), k, v, g if gk is None else gk)
