"""Position alone: a logit for each distance in segments, the paper's ablation of content (Table 5).

`u_t = x_t W_u` holds one logit a distance; untrained it is zero and every segment counts the same,
but for a hair that breaks ties towards the nearest.
"""

from __future__ import annotations

from torch import Tensor

from mcretrofit.routers import Asked, Opened
from mcretrofit.segments import Bank

UNIT, USES_QUERY, POSITIVE, TEMPERATURE = False, False, False, 1.0
HAIR = 1e-5


def width(keys: int) -> int:
    """Nothing of the segment."""
    return 0


def summarise(keys: Tensor, valid: Tensor) -> Tensor:
    """`[B, S, C, H, K]` -> `[B, S, H, 0]`."""
    return keys.new_zeros(*keys.shape[:2], keys.shape[3], 0)


def score(asked: Asked, bank: Bank, opened: Opened | None) -> tuple[Tensor, Tensor | None]:
    """The logit of the distance `s - i` (of the farthest where there are more), and of distance 0."""
    away = (bank.index[..., None] - bank.number[:, None])[:, :, None]
    at = away.clamp(0, asked.u.shape[-1] - 1).expand(-1, -1, asked.u.shape[2], -1)
    # the hair grows on where the logits are at their end, or the farthest segments would tie
    return asked.u.gather(-1, at) - HAIR * away, asked.u[..., 0]
