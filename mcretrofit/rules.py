"""From scores to logits without training: the plain rule and the z rule (MATH 16).

`plain`: a temperature times the score, the open segment scored like the others.
`z`: a cached segment counts where its score is surprising, `2 ((s - mean) / spread - margin)` against 0
for the online read, with mean and spread from calibration text: unsurprised tokens read as before.
Beyond MATH 16, because measured on the embedded models at eight times their training length:
- scores are first taken relative to the token's own mean over segments (`relative`): what a token
  scores with everything depends on the token, 8 +- 4 on a head where a match adds .5;
- the cached heads of a layer share one route, their mean surprise (`shared`): builtin:gla finds .88 of
  32 needles with a route a head and all with one for both (`eval --task niah --lengths 4k --no-shared`);
- the best of many segments stands out a little more than the best of few, whatever they hold: the
  margin rises with the logarithm of their number (`rise`), or half of all tokens would find something
  surprising in 8,192 tokens of prose where a twentieth does in 2,048;
- surprise saturates: of two segments that are both certain neither silences the other, as where a
  fact lies across their border.
"""

from __future__ import annotations

import torch
from torch import Tensor

RULES = ("z", "plain")
Z_TEMPERATURE = 2.0
CERTAIN = 4.0  # a logit: the online read keeps a weight of 2 % beside it
RISE = 1e-2  # what every unit of surprise beyond it still adds
TINY = 1e-6
FEW = 4  # segments, the usual number where thresholds are measured
STEEP = 0.75  # spreads for e times as many


def plain(scores: Tensor, online: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Logits `[B, T, H, N]` and `[B, T, H]`; the temperature may be one a head `[H]`."""
    return _by_head(temperature) * scores, temperature * online


def usual(scores: Tensor, visible: Tensor) -> Tensor:
    """The token's own mean over the segments that it sees `[B, T, H]` of `[B, T, H, N]`, `[B, T, N]`."""
    seen = visible[:, :, None].to(scores.dtype)
    return ((scores * seen).sum(-1) / seen.sum(-1).clamp_min(1)).clamp_min(TINY)


def among(own: Tensor, usual: Tensor, visible: Tensor) -> Tensor:
    """A score `[B, T, H]` over the mean of it and all others; `usual` is the mean of the others."""
    # a token that sees none is one of the first: nothing is compared, and no gradient is lost
    others = visible.sum(-1)[..., None].clamp_min(1).to(own.dtype)
    return own * (others + 1) / (others * usual + own)


def relative(scores: Tensor, visible: Tensor) -> Tensor:
    """Scores over the token's own mean, so that no token is loud by nature; one segment alone is 1."""
    return scores / usual(scores, visible)[..., None]


def rise(visible: Tensor, heads: int = 1) -> Tensor:
    """What the margin rises by, in spreads `[B, T]`, for the segments that each token sees `[B, T, N]`.

    The mean of several heads strays less than one of them.
    """
    return STEEP / heads**0.5 * (visible.sum(-1).clamp_min(FEW) / FEW).log()


def z(
    scores: Tensor,
    mean: Tensor,
    std: Tensor,
    margin: float | Tensor,
    temperature: float | Tensor,
    shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logits `[B, T, H, N]` and `[B, T, H]` from the heads' `mean` and `std [H]`.

    The margin, in spreads, may be one of each token `[B, T, 1, 1]`.
    """
    surprise = (scores - mean[:, None]) / std[:, None].clamp_min(TINY)
    if shared:
        surprise = surprise.mean(2, keepdim=True).expand_as(surprise)
    logits = _by_head(temperature) * (surprise - margin)
    return saturated(logits), scores.new_zeros(scores.shape[:-1])


def _by_head(temperature: float | Tensor) -> float | Tensor:
    return temperature[:, None] if isinstance(temperature, Tensor) else temperature


def saturated(logits: Tensor) -> Tensor:
    """Positive logits bent towards `CERTAIN`, rising on a little so that the order stays."""
    bent = CERTAIN * (logits / CERTAIN).tanh() + RISE * logits
    return torch.where(logits > 0, bent, logits)
