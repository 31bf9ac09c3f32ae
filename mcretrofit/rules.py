"""From scores to logits without training: the plain rule and the z rule (MATH 16).

`plain`: a temperature times the score, the open segment scored like the others.
`z`: a cached segment counts where its score is surprising, `2 ((s - mean) / std - margin)` against 0
for the online read, with mean and std from calibration text: unsurprised tokens read as before.
The scores are first taken relative to the token's own mean over segments (`relative`): what a token
scores with everything depends on the token (8 +- 4 on a head where a match adds .5), and on a Gated
DeltaNet whose keys share one direction the raw rule at margin 1 cost 1.4 % of prose, the relative .04 %.
Of many segments the best one always stands out a little: at margin 1 that model lost 6 points of its
four-pair recall at eight times its training length, at margin 2 none beyond the interval.
"""

from __future__ import annotations

from torch import Tensor

RULES = ("z", "plain")
Z_TEMPERATURE = 2.0
TINY = 1e-6


def plain(scores: Tensor, online: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logits `[B, T, H, N]` and `[B, T, H]`."""
    return temperature * scores, temperature * online


def relative(scores: Tensor, visible: Tensor) -> Tensor:
    """Scores over the token's own mean of the visible segments, so that no token is loud by nature.

    `[B, T, H, N]`, `[B, T, N]`; one visible segment alone is 1: it cannot stand out.
    """
    seen = visible[:, :, None].to(scores.dtype)
    mean = (scores * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)
    return scores / mean.clamp_min(TINY)


def z(scores: Tensor, mean: Tensor, std: Tensor, margin: float, temperature: float):
    """Logits `[B, T, H, N]` and `[B, T, H]` from the heads' `mean` and `std [H]`."""
    surprise = (scores - mean[:, None]) / std[:, None].clamp_min(1e-6)
    return temperature * (surprise - margin), scores.new_zeros(scores.shape[:-1])
