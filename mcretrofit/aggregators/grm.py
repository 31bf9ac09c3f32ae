"""Gated residual memory: softmax over all segments (arXiv 2602.24281, eq 9)."""

from __future__ import annotations

from mcretrofit.aggregators import Reading, Weights, softmax

MIXES = "reads"


def weigh(reading: Reading) -> Weights:
    """Gammas of every segment."""
    return softmax(*reading.logits())
