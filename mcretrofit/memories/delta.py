"""Delta rule `S_t = a_t S_{t-1} + k_t u_t^T`, `u_t = beta_t (v_t - (a_t S_{t-1})^T k_t)`.

Without decay DeltaNet (arXiv 2406.06484), with one decay a head Gated DeltaNet (2412.06464), with one
a channel the rule of Kimi Delta Attention (2510.26692).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mcretrofit.memories import Streams
from mcretrofit.memories._delta import chunks as chunks
from mcretrofit.memories._delta import step as step

MERGES = False  # what a segment erases depends on what was there


def example(batch: int, length: int, heads: int, width: int, decay: str = "head") -> Streams:
    """Random streams; `decay` is `none`, `head` or `channel`."""
    shape = (batch, length, heads, width)
    q, k = (F.normalize(torch.randn(shape), dim=-1) for _ in range(2))
    drawn = {"none": None, "head": torch.randn(shape[:3]), "channel": torch.randn(shape)}[decay]
    log = None if drawn is None else F.logsigmoid(drawn) / 4
    return Streams(q, k, torch.randn(shape), log, torch.rand(shape[:3]))
