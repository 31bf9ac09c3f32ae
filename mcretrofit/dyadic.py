"""Logarithmic segments: closed ones merge like a binary counter's digits (arXiv 2602.24281, 4.2).

After n closed segments a row holds one state for every set bit of n: at most log2 n + 1 of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mcretrofit.memories._scan import kept
from mcretrofit.segments import Bank, SegmentCache


@dataclass
class DyadicCache(SegmentCache):
    """A `SegmentCache` whose slot l holds the row's block of 2^l segments, where bit l is set."""

    decays: Tensor | None = None  # [B, levels, H] or [B, levels, H, K], total log decay of a block

    def push(
        self,
        state: Tensor,
        summary: Tensor,
        decay: Tensor | None,
        rows: Tensor,
        adds: bool | Tensor,
        merge: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Close one segment in the rows where `rows [B]`; full levels cascade upwards.

        `adds`: a block's state is what its halves wrote, else (carry) it is the later running state,
        either by head where `adds [H, 1, 1]`;
        `merge` makes a block's summary of those of its halves.
        """
        self._room(state, summary, decay)
        going = rows
        for level in range(self.states.shape[1]):
            taken = (self.counts >> level & 1).bool()
            place, full = going & ~taken, going & taken
            self.states = self._set(self.states, level, state, place)
            self.summaries = self._set(self.summaries, level, summary, place)
            if decay is not None:
                self.decays = self._set(self.decays, level, decay, place)
            if not full.any():
                break
            if adds is not False:
                state = state + adds * kept(self.states[:, level], decay)
            summary = merge(self.summaries[:, level], summary)
            decay = None if decay is None else decay + self.decays[:, level]
            going = full
        self.counts = self.counts + rows.long()
        self.held = int(self.counts.max())

    def _room(self, state: Tensor, summary: Tensor, decay: Tensor | None) -> None:
        levels = (self.held + 1).bit_length()
        for name, one in (("states", state), ("summaries", summary), ("decays", decay)):
            have = getattr(self, name)
            if one is None:
                continue
            have = one.new_zeros(len(one), 0, *one.shape[1:]) if have is None else have
            more = levels - have.shape[1]
            if more > 0:
                have = torch.cat([have, have.new_zeros(len(have), more, *have.shape[2:])], 1)
            setattr(self, name, have)

    @staticmethod
    def _set(buffer: Tensor, level: int, value: Tensor, rows: Tensor) -> Tensor:
        here = rows.view(-1, *[1] * (value.dim() - 1))
        level_value = torch.where(here, value, buffer[:, level])
        return torch.cat([buffer[:, :level], level_value[:, None], buffer[:, level + 1 :]], 1)

    def occupied(self, closing: Tensor | None) -> Tensor:
        """Which slots hold a block `[B, levels]`, the newest one left out in the rows `closing [B]`."""
        counts = self.counts
        if closing is not None:
            counts = torch.where(closing, counts & (counts - 1), counts)
        levels = torch.arange(self.states.shape[1], device=counts.device)
        return (counts[:, None] >> levels & 1).bool()

    def newest(self) -> Tensor:
        """The slot of the newest block `[B]`."""
        low = self.counts & -self.counts
        return low.clamp_min(1).double().log2().long()

    def bank(self, index: Tensor, closing: Tensor | None = None) -> Bank:
        """What tokens of the segments `index [B, T]` may read now; where `closing`, the newest block
        is the token's online memory and no past one."""
        seen = self.occupied(closing)
        levels = torch.arange(seen.shape[1], device=index.device)
        # a block's number is that of its last segment: the bits of the count down to its own
        number = (self.counts[:, None] >> levels << levels) - 1
        visible = seen[:, None].expand(-1, index.shape[1], -1)
        return Bank(self.states, self.summaries, visible, index, number, self.newest())
