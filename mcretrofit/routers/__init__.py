"""Routers: how well a token's query fits a segment. The contract.

A router is a module with
- `width(keys) -> int`: floats that it keeps of a segment and head (its summary);
- `summarise(keys, valid) -> [B, S, H, P]` of keys `[B, S, C, H, K]` (zero where not `valid [B, S, C]`);
  the summaries of a segment's parts add up to the segment's;
- `score(asked, bank, opened) -> (cached [B, T, H, N], online [B, T, H] or None)`: the open segment's
  score, up to and including each token, only where `opened` is given;
- `UNIT`: keys and queries are made unit vectors first; `USES_QUERY`: whether an untrained gate asks
  with the read query; `POSITIVE`: scores are never negative and can be
  compared with their mean; `TEMPERATURE`: that of the plain rule (`rules.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Asked(NamedTuple):
    """What tokens ask with: `u`, the (gated) query, the read query `q`, and the online read."""

    u: Tensor  # [B, T, H, K]
    q: Tensor  # [B, T, H, K]
    online: Tensor  # [B, T, H, V]


class Opened(NamedTuple):
    """The segments that hold the tokens, each seen up to its token; T = S * size."""

    keys: Tensor  # [B, T, H, K]
    valid: Tensor  # [B, T]
    before: Tensor  # [B, S, H, P], summaries of what earlier calls put there
    size: int
    places: Tensor | None = None  # [B, T], the tokens' places in their rows, where controls ask

    def fold(self, x: Tensor) -> Tensor:
        """`[B, T, ...]` -> `[B * S, size, ...]`."""
        return x.unflatten(1, (-1, self.size)).flatten(0, 1)

    def unfold(self, x: Tensor) -> Tensor:
        """The inverse of `fold`."""
        return x.unflatten(0, (self.valid.shape[0], -1)).flatten(1, 2)
