"""Plain average of all reads, online included (arXiv 2602.24281, 4.3; MATH 9)."""

from __future__ import annotations

from mcretrofit.aggregators import Reading, Weights

MIXES = "reads"


def weigh(reading: Reading) -> Weights:
    """One over the number of segments so far, for each."""
    seen = reading.visible[:, :, None].float().expand(-1, -1, reading.heads, -1)
    share = 1 / (seen.sum(-1) + 1)
    return Weights(share, seen * share[..., None])
