"""Sparse selective caching: the best `top_k` cached segments and the online one (2602.24281, eq 17)."""

from __future__ import annotations

from mcretrofit.aggregators import Reading, Weights, softmax

MIXES = "reads"


def weigh(reading: Reading, *, top_k: int = 2) -> Weights:
    """Gammas over the selected segments and the online one; all others are zero."""
    cached, online = reading.logits()
    best = cached.topk(min(top_k, cached.shape[-1]), dim=-1)
    return softmax(best.values, online, best.indices)
