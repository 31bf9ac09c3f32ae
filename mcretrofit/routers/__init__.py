"""Routers: how well a token's query fits a segment. The contract.

A router is a module with
- `width(keys) -> int`: floats that it keeps of a segment and head (its summary);
- `summarise(keys, valid) -> [B, S, H, P]` of keys `[B, S, C, H, K]` (zero where not `valid [B, S, C]`);
  the summaries of a segment's pieces add up to the segment's, or `merge(before, after)` makes it of
  them. A router with `PARTS` is also given `part [B, S, C]`: in which of so many equal parts of its
  segment each token lies, with `PLACES` at which place of it;
- `score(asked, bank, opened) -> (cached [B, T, H, N], online [B, T, H] or None)`: the open segment's
  score, up to and including each token, only where `opened` is given;
- optionally `settled(u, opened) -> [B, T, H]`: the open segment's score up to `opened.lag` tokens before
  each token (nearer stands the question itself); what is not written yet is made up for, unless
  scores do not add up over a segment's tokens (`ADDS = False`);
- `UNIT`: keys and queries are made unit vectors first; `WHITENS`: keys are then turned as questions
  are; `USES_QUERY`: whether an untrained gate asks with the read query; `POSITIVE`: scores are never
  negative and can be compared with their mean; `TEMPERATURE`: that of the plain rule (`rules.py`);
  `LOUD`: shares of plain text's tokens that may be surprised, where `surprise.LOUD` are too many;
  `STATES`: it looks at the cached states and at nothing else; `BESIDE`: names of routers that
  `calibrate` tries for each head besides this one.
Heads of a layer may have routers of their own (`_byhead.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

NEAR = 8  # tokens, the most that `lag` can be


class Asked(NamedTuple):
    """What tokens ask with: `u`, the (gated) query, the read query `q`, and the online read."""

    u: Tensor  # [B, T, H, K]
    q: Tensor  # [B, T, H, K]
    online: Tensor  # [B, T, H, V]
    # `(i, x) -> x_t W_t` of the online network's layer i, where a soup asks
    layer: Callable[[int, Tensor], Tensor] | None = None


class Opened(NamedTuple):
    """The segments that hold the tokens, each seen up to its token; T = S * size."""

    keys: Tensor  # [B, T, H, K]
    valid: Tensor  # [B, T]
    before: Tensor  # [B, S, H, P], summaries of what earlier calls put there
    size: int
    places: Tensor | None = None  # [B, T], the tokens' places in their rows, where controls ask
    share: Tensor | None = None  # [B, T], what of a whole segment was written `lag` tokens before
    lag: int = 0
    near: Tensor | None = None  # [B, lag, H, K], keys of the first segment just before this call
    begun: Tensor | None = None  # [B], where in the first segment this call's tokens begin
    part: Tensor | None = None  # [B, T], which part or place of its segment, where a router asks

    def cut(self, tokens: slice, before: Tensor, size: int) -> Opened:
        """A run of segments with what earlier calls put there."""
        first = tokens.start == 0
        return Opened(
            self.keys[:, tokens],
            self.valid[:, tokens],
            before,
            size,
            None if self.places is None else self.places[:, tokens],
            None if self.share is None else self.share[:, tokens],
            self.lag,
            self.near if first else None,
            self.begun,
            None if self.part is None else self.part[:, tokens],
        )

    def fold(self, x: Tensor) -> Tensor:
        """`[B, T, ...]` -> `[B * S, size, ...]`."""
        return x.unflatten(1, (-1, self.size)).flatten(0, 1)

    def unfold(self, x: Tensor) -> Tensor:
        """The inverse of `fold`."""
        return x.unflatten(0, (self.valid.shape[0], -1)).flatten(1, 2)
