"""Memories: update rules `state_t = f(state_{t-1}; k_t, v_t)` (arXiv 2602.24281, eq 4b). The contract.

A memory is a module with
- `step(streams, state) -> (out, state)`: one token, write then read; the recurrence as it is written.
- `chunks(streams, state, every) -> (out [B, T, H, V], state, ends)`: the same for many tokens with
  matrix products; `ends [B, T / every, H, K, V]` are the states after every `every` tokens.
- `example(batch, length, heads, width) -> Streams`: a small input that the laws run on.
All-zero streams are inert: such a token leaves the state as it is, so padding is zeros.
Shapes, `naive`, `scan`, `scan_segments`, `read` and `written` are the same for all of them: `_scan`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Streams(NamedTuple):
    """What one call of a recurrence reads; time is dim 1. `decay` is in log space (0 keeps all)."""

    q: Tensor  # [B, T, H, K], scaled as the family reads
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, H, V]
    decay: Tensor | None = None  # [B, T, H] or [B, T, H, K], <= 0
    beta: Tensor | None = None  # [B, T, H], writing strength
    a: Tensor | None = None  # [B, T, H, K], what is read off the old state ...
    b: Tensor | None = None  # [B, T, H, K], ... and where it is put (rwkv7)

    def map(self, function) -> Streams:  # noqa: ANN001
        """The streams with `function` applied to each one that is there."""
        return Streams(*(None if s is None else function(s) for s in self))

    @property
    def length(self) -> int:
        return self.q.shape[1]
