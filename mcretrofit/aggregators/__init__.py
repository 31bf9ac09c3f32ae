"""Aggregators: how much of each read a token takes. The contract.

An aggregator is a module with `weigh(reading, *, options) -> Weights`; its keyword-only arguments are
its schema in YAML and on the command line. `y = online * o + sum_i cached_i * M_i q` follows from the
weights in one place (`caching.py`), so that kernels see weights, and laws see gammas.
`MIXES` says what the weights mix: `reads` (all but) or `states` (soup; the same for a matrix memory).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Reading(NamedTuple):
    """What a token may read and how it scored: `scores()` gives logits `[B, T, H, N]`, `[B, T, H]`."""

    visible: Tensor  # [B, T, N]
    heads: int
    scores: Callable[[], tuple[Tensor, Tensor]]

    def logits(self) -> tuple[Tensor, Tensor]:
        """The scores with unseen segments at minus infinity."""
        cached, online = self.scores()
        return cached.masked_fill(~self.visible[:, :, None], float("-inf")), online


class Weights(NamedTuple):
    """Weights of the online read and of the cached ones (of the segments `indices`, else of all)."""

    online: Tensor  # [B, T, H]
    cached: Tensor  # [B, T, H, N] or [B, T, H, k]
    indices: Tensor | None = None  # [B, T, H, k]


def softmax(cached: Tensor, online: Tensor, indices: Tensor | None = None) -> Weights:
    """Gammas over cached segments and the online one together (MATH 3.2 c)."""
    gamma = torch.cat([cached, online[..., None]], -1).softmax(-1)
    return Weights(gamma[..., -1], gamma[..., :-1], indices)
