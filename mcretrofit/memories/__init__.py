"""Memories: update rules `state_t = f(state_{t-1}; k_t, v_t)` (arXiv 2602.24281, eq 4b). The contract.

A memory is a module with
- `step(streams, state) -> (out, state)`: one token, write then read; the recurrence as it is written.
- `chunks(streams, state, every) -> (out [B, T, H, V], state, ends)`: the same for many tokens with
  matrix products; `ends [B, T / every, H, K, V]` are the states after every `every` tokens.
- `example(batch, length, heads, width) -> Streams`: a small input that the laws run on.
- `MERGES`: whether two neighbouring segments' own writes give what a token after both reads;
- optionally `READS_FIRST = True` where a token reads before it writes, and so never sees itself.
All-zero streams are inert: such a token leaves the state as it is, so padding is zeros.
Shapes, `naive`, `scan`, `scan_segments`, `read` and `written` are the same for all of them: `_scan`.

A state that is more than one matrix is a tuple of batch-first tensors (tuples of them inside), float32
and `[B, H, ...]` throughout. Such a memory also has
- `init_state(streams) -> state`: what a segment starts from;
- `weights(state)`: the part of a state that is cached and read: one matrix, or a tuple of them;
- `read(weights [B, N, H, ...], q) -> [B, T, N, H, V]` where that is not a product with a matrix;
- `RAGGED = True` where `chunks` takes inputs of any length.
A memory with a `read` of its own is a network: neither its states nor its reads can be subtracted.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inner(NamedTuple):
    """How a deep memory learns: its first weights, what it minimises, how often it looks."""

    start: tuple[Tensor, ...]  # M_0: [H, K, E] and [H, E, V], or one matrix [H, K, V]
    objective: str  # `dot`: -<M(k), v>, or `l2`: |M(k) - v|^2
    chunk: int  # tokens whose gradients are all taken at the weights before the first of them
    where: str = "a deep memory"  # named where its state turns infinite


class Streams(NamedTuple):
    """What one call of a recurrence reads; time is dim 1. `decay` is in log space (0 keeps all)."""

    q: Tensor  # [B, T, H, K], scaled as the family reads
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, H, V]
    decay: Tensor | None = None  # [B, T, H] or [B, T, H, K], <= 0
    beta: Tensor | None = None  # [B, T, H], writing strength; [B, T, H, c] for the last c tokens
    a: Tensor | None = None  # [B, T, H, K], what is read off the old state ...
    b: Tensor | None = None  # [B, T, H, K], ... and where it is put (rwkv7)
    momentum: Tensor | None = None  # [B, T, H], log share of the last update that goes on
    inner: Inner | None = None  # no stream: the same for every token

    def map(self, function) -> Streams:  # noqa: ANN001
        """The streams with `function` applied to each one that is there."""
        streams = (None if s is None else function(s) for s in self[:-1])
        return Streams(*streams, self.inner)

    def heads(self, some: list[int] | Tensor) -> Streams:
        """The streams of some heads, a deep memory's first weights included."""
        picked = self.map(lambda s: s[:, :, some])
        if self.inner is None:
            return picked
        start = tuple(w[some] for w in self.inner.start)
        return picked._replace(inner=self.inner._replace(start=start))

    @property
    def length(self) -> int:
        return self.q.shape[1]
