"""Memory soup: the states are mixed, then read once (arXiv 2602.24281, eq 15)."""

from __future__ import annotations

from mcretrofit.aggregators import Reading, Weights, softmax

MIXES = "states"


def weigh(reading: Reading) -> Weights:
    """Gammas of every segment."""
    return softmax(*reading.logits())
