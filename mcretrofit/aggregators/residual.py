"""Residual memory: the sum of all reads (arXiv 2602.24281, eq 7)."""

from __future__ import annotations

from mcretrofit.aggregators import Reading, Weights

MIXES = "reads"


def weigh(reading: Reading) -> Weights:
    """One for every segment."""
    seen = reading.visible[:, :, None].float().expand(-1, -1, reading.heads, -1)
    return Weights(seen.new_ones(seen.shape[:-1]), seen)
