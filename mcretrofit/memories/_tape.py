"""What a deep memory's scan leaves behind so that any of its layers can be read again.

A soup mixes weights, not outputs: the input of the second layer depends on what the first layers of all
memories gave together. So every layer of the open segment is read for itself, `x W_t` for all tokens,
without the weights of any one token (arXiv 2602.24281, eq 15).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from mcretrofit.memories import Streams
from mcretrofit.memories._inner import Steps, forward
from mcretrofit.memories._networks import running


class Entry(NamedTuple):
    """One chunk: weights and momenta before it `[G, *, *]`, its gradients' factors, its steps."""

    memory: tuple[Tensor, ...]
    momenta: tuple[Tensor, ...]
    pairs: list[tuple[Tensor, Tensor]]
    given: Steps

    def read(self, layer: int, x: Tensor) -> Tensor:
        """`x_t W_t` of a layer for every token `x [G, b, *]` of the chunk."""
        z, r = self.pairs[layer]
        out = (x @ self.memory[layer]) * self.given.kept
        if self.momenta:
            out = torch.addcmul(out, x @ self.momenta[layer], self.given.drift)
        return torch.baddbmm(out, self.given.inside * (x @ z.transpose(1, 2)), r, alpha=-1)

    def after(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Weights and momenta behind the chunk."""
        fresh, moving, given = [], [], self.given
        for i, (z, r) in enumerate(self.pairs):
            back, base = z.transpose(1, 2), self.memory[i] * given.kept[:, -1:]
            if self.momenta:
                base = torch.addcmul(base, self.momenta[i], given.drift[:, -1:])
                still = self.momenta[i] * given.total
                moving.append(torch.baddbmm(still, back, given.late * r, alpha=-1))
            fresh.append(torch.baddbmm(base, back, given.last * r, alpha=-1))
        return tuple(fresh), tuple(moving)


class Tape(NamedTuple):
    """All chunks of a scan, and how tokens lie in them."""

    entries: list[Entry]
    lay: Callable[[Tensor], Tensor]  # [B, T, H, D] -> [n, G, b, D]
    take: Callable[[Tensor], Tensor]  # its inverse

    def read(self, layer: int, x: Tensor) -> Tensor:
        """`x_t W_t` of the running weights for every token: `[B, T, H, *]` -> `[B, T, H, *]`."""
        laid = self.lay(x)
        return self.take(
            torch.stack([e.read(layer, one) for e, one in zip(self.entries, laid, strict=True)])
        )


class Taping:
    """A deep memory, as a scan takes it, that keeps the tapes of its scan."""

    RAGGED = True

    def __init__(self, memory: ModuleType) -> None:
        self.memory, self.init_state = memory, memory.init_state
        self.layers: list[Callable[[int, Tensor], Tensor]] = []
        self.rows = 0

    def step(self, streams: Streams, state: tuple) -> tuple[Tensor, tuple]:
        """One token, as the memory reads it."""
        out, state = self.memory.step(streams, state)
        self._keep(streams, running(self.memory.weights(state)))
        return out, state

    def chunks(self, streams: Streams, state: tuple, every: int) -> tuple[Tensor, tuple, tuple]:
        """Many tokens, a tape for every `every` of them."""
        return self.memory.chunks(streams, state, every, self._run)

    def _run(self, streams: Streams, state: tuple) -> tuple[Tensor, tuple]:
        tape, state = self.memory.taped(streams, state)
        self._keep(streams, tape.read)
        return forward(len(self.memory.weights(state)), streams.q, tape.read), state

    def _keep(self, streams: Streams, read: Callable[[int, Tensor], Tensor]) -> None:
        self.layers.append(read)
        self.rows = streams.q.shape[0]

    def read(self, layer: int, x: Tensor) -> Tensor:
        """`x_t W_t` for every token `x [B, T, H, *]` of the scan, side by side as its segments ran."""
        parts = x.reshape(self.rows, -1, *x.shape[2:]).chunk(len(self.layers), 1)
        reads = [run(layer, part) for run, part in zip(self.layers, parts, strict=True)]
        return torch.cat(reads, 1).reshape(*x.shape[:3], -1)
