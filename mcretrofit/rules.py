"""From scores to logits without training: the plain rule and the z rule (MATH 16).

`plain`: a temperature times the score, the open segment scored like the others.
`z`: a cached segment counts where its score is surprising, `2 ((s - mean) / std - margin)` against 0
for the online read, with mean and std from calibration text: unsurprised tokens read as before.
"""

from __future__ import annotations

from torch import Tensor

RULES = ("z", "plain")
Z_TEMPERATURE = 2.0


def plain(scores: Tensor, online: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logits `[B, T, H, N]` and `[B, T, H]`."""
    return temperature * scores, temperature * online


def z(scores: Tensor, mean: Tensor, std: Tensor, margin: float, temperature: float):
    """Logits `[B, T, H, N]` and `[B, T, H]` from the heads' `mean` and `std [H]`."""
    surprise = (scores - mean[:, None]) / std[:, None].clamp_min(1e-6)
    return temperature * (surprise - margin), scores.new_zeros(scores.shape[:-1])
