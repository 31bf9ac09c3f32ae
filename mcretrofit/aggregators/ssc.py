"""Sparse selective caching: the best `top_k` cached segments and the online one (2602.24281, eq 17)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mcretrofit.aggregators import Reading, Weights, softmax

MIXES = "reads"


def weigh(reading: Reading, *, top_k: int | Sequence[int] = 2) -> Weights:
    """Gammas over the selected segments and the online one; all others are zero.

    `top_k` may be a number for each head.
    """
    cached, online = reading.logits()
    counts = [top_k] if isinstance(top_k, int) else top_k
    best = cached.topk(min(max(counts), cached.shape[-1]), dim=-1)
    values = best.values
    if len(set(counts)) > 1:
        rank = torch.arange(values.shape[-1], device=values.device)
        most = torch.tensor(counts, device=values.device)[:, None]
        values = values.masked_fill(rank >= most, -torch.inf)
    return softmax(values, online, best.indices)
