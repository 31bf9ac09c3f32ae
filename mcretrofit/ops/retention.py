"""Retention: one fixed decay a head, `log(1 - 2^-(5 + h))` (`fla.ops.retention`, arXiv 2307.08621)."""

from __future__ import annotations

import torch
from torch import Tensor

from mcretrofit.memories import Streams, linear
from mcretrofit.ops._call import scaled

NAMES = (
    "chunk_retention",
    "fused_chunk_retention",
    "fused_recurrent_retention",
    "parallel_retention",
)
MEMORY = linear


def streams(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **_: object) -> Streams:
    """Scale and decay inside."""
    heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
    decay = torch.log1p(-torch.exp2(-5.0 - heads))
    return Streams(scaled(q, scale), k, v, decay.expand(*q.shape[:2], -1))
