"""Sliding-window linear attention: the last c tokens written at every step (arXiv 2602.24281, 26)."""

from __future__ import annotations

from torch import Tensor

from mcretrofit.memories import Streams, swla
from mcretrofit.ops._call import l2norm

NAMES = ("chunk_swla",)
MEMORY = swla


def streams(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: object) -> Streams:
    """L2 norm of queries and keys inside; `g [B, T, H]` in log space, `beta [B, T, H, c]`."""
    return Streams(l2norm(q), l2norm(k), v, g, beta)
