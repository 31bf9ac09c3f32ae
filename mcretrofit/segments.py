"""Where segments end (`Frame`) and what is kept of the closed ones (`SegmentCache`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.memories._scan import State, leaves, tree


class Bank(NamedTuple):
    """What the tokens of some segments may read: `visible[b, t, i]` says that token t sees state i."""

    states: State  # [B, N, H, K, V], or the weights of networks [B, N, H, *, *]
    summaries: Tensor  # [B, N, H, P]
    visible: Tensor  # [B, T, N]
    index: Tensor  # [B, T], the number of the segment that holds the token
    number: Tensor  # [B or 1, N], the number of the (last) segment of each state
    newest: Tensor | None = None  # [B], the slot of the last closed block


@dataclass
class SegmentCache:
    """Frozen end states of closed segments, their summaries, and the open segment's bookkeeping.

    Buffers are preallocated and double when full; rows of a batch may hold different counts.
    """

    counts: Tensor  # [B], closed segments
    phase: Tensor  # [B], tokens in the open segment
    states: Tensor | None = None  # [B, capacity, H, K, V], of networks [B, capacity, H, P]
    summaries: Tensor | None = None  # [B, capacity, H, P]
    open_summary: Tensor | None = None  # [B, H, P]
    open_decay: Tensor | None = None  # [B, H] or [B, H, K], total log decay of the open segment
    origin: Tensor | None = None  # [B, H, K, V], the open segment's start, to be subtracted
    online: State | None = None  # [B, H, ...], the open segment's own state, begun afresh
    near: Tensor | None = None  # [B, n, H, K], keys of the open segment's last n tokens, or zeros
    held: int = field(default=0)  # the largest of `counts`
    alike: bool = True  # every row has the same phase and count

    @classmethod
    def start(cls, batch: int, device: torch.device) -> SegmentCache:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        return cls(zeros, zeros.clone())

    def tensors(self) -> dict[str, Tensor]:
        """Everything held, by name."""
        held = {k: v for k, v in vars(self).items() if isinstance(v, (Tensor, tuple))}
        return {f"{k}.{i}": t for k, v in held.items() for i, t in enumerate(leaves(v))}

    def nbytes(self) -> int:
        """Bytes really held, spare capacity included and what is shared counted once."""
        held = [t.untyped_storage() for t in self.tensors().values()]
        return sum({s.data_ptr(): s.nbytes() for s in held}.values())

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> SegmentCache:
        """`function` (an index over the batch) applied to every tensor; for beams and selections."""
        for name, value in vars(self).items():
            if isinstance(value, (Tensor, tuple)):
                setattr(self, name, tree(function, value))
        return self

    def settle(self, laid: Frame) -> None:
        """Remember whether the rows still agree."""
        self.alike = self.alike and laid.slots is None
        self.phase = laid.phase

    def remember(self, keys: Tensor, laid: Frame, tokens: Tensor, most: int) -> Tensor:
        """Keep the last `most` keys of the open segment; returns those before `keys [B, F, H, K]`.

        `tokens [B]` of them are each row's own.
        """
        before = self.near
        if before is None:
            before = keys.new_zeros(keys.shape[0], most, *keys.shape[2:])
        steps = torch.arange(most, device=keys.device)
        back = tokens[:, None] - most + steps
        at = most + back + (back >= 0) * laid.begun[:, None]
        rows = torch.arange(len(tokens), device=keys.device)[:, None]
        alive = steps >= most - laid.phase[:, None]
        self.near = torch.cat([before, keys], 1)[rows, at] * alive[..., None, None]
        return before

    def append(self, states: Tensor, summaries: Tensor, closed: Tensor) -> None:
        """Put the first `closed[b]` of `[B, n, ...]` after each row's own; surplus ones stay unseen."""
        if self.states is None:
            shape = (states.shape[0], 0)
            self.states = states.new_zeros(*shape, *states.shape[2:])
            self.summaries = summaries.new_zeros(*shape, *summaries.shape[2:])
        if torch.is_grad_enabled() and self.alike:
            self.states = torch.cat([self.states[:, : self.held], states], 1)
            self.summaries = torch.cat([self.summaries[:, : self.held], summaries], 1)
        else:
            self._write(states, summaries)
        self.counts = self.counts + closed
        self.held += states.shape[1] if self.alike else 0
        self.held = self.held if self.alike else int(self.counts.max())

    def _write(self, states: Tensor, summaries: Tensor) -> None:
        more = states.shape[1]
        self._reserve(self.held + more)
        if self.alike:
            self.states[:, self.held : self.held + more] = states
            self.summaries[:, self.held : self.held + more] = summaries
            return
        rows = torch.arange(states.shape[0], device=states.device)[:, None]
        slots = self.counts[:, None] + torch.arange(more, device=states.device)
        self.states = self.states.index_put((rows, slots), states)
        self.summaries = self.summaries.index_put((rows, slots), summaries)

    def _reserve(self, size: int) -> None:
        capacity = self.states.shape[1]
        if size <= capacity:
            return
        more = max(size, 2 * capacity) - capacity if capacity else size
        self.states, self.summaries = (
            torch.cat([t, t.new_zeros(t.shape[0], more, *t.shape[2:])], 1)
            for t in (self.states, self.summaries)
        )

    def bank(self, index: Tensor, last: int) -> Bank:
        """The bank for tokens of segments `index [B, T]`, which see at most `last` segments."""
        slots = torch.arange(last, device=index.device)
        visible = slots < index[..., None]
        return Bank(self.states[:, :last], self.summaries[:, :last], visible, index, slots[None])


class Frame(NamedTuple):
    """How tokens `[B, T]` lie in whole segments `[B, count * size]`; other slots are inert."""

    size: int
    count: int
    lead: int  # free slots before the first token, where all rows agree
    length: int  # T
    slots: Tensor | None  # [B, T] where they do not; padding has slot -1
    closed: Tensor  # [B], segments that these tokens close
    phase: Tensor  # [B], tokens in the open segment afterwards
    begun: Tensor  # [B], the slot of a row's first token

    closing: int  # the largest of `closed`

    @property
    def width(self) -> int:
        return self.size * self.count

    def put(self, x: Tensor) -> Tensor:
        """`[B, T, ...]` -> `[B, count * size, ...]`, zeros elsewhere."""
        if self.slots is None:
            tail = self.width - self.lead - self.length
            if not self.lead and not tail:
                return x
            return F.pad(x, (0,) * (2 * (x.dim() - 2)) + (self.lead, tail))
        rows = torch.arange(x.shape[0], device=x.device)[:, None].expand_as(self.slots)
        kept = self.slots >= 0
        out = x.new_zeros(x.shape[0], self.width, *x.shape[2:])
        return out.index_put((rows[kept], self.slots[kept]), x[kept])

    def take(self, y: Tensor) -> Tensor:
        """The inverse of `put`; padding reads zero."""
        if self.slots is None:
            return y[:, self.lead : self.lead + self.length]
        rows = torch.arange(y.shape[0], device=y.device)[:, None]
        out = y[rows, self.slots.clamp_min(0)]
        return out * (self.slots >= 0).view(*self.slots.shape, *[1] * (y.dim() - 2)).to(y.dtype)


def frame(
    cache: SegmentCache, valid: Tensor | None, length: int, size: int, strict: bool = False
) -> Frame:
    """Lay `length` tokens (where `valid [B, T]`) behind the open segments; one frame if none closes.

    `strict`: a segment's last token always lies in a segment's last slot.
    """
    tokens = torch.full_like(cache.phase, length) if valid is None else valid.sum(1)
    ends = cache.phase + tokens
    closed, phase = ends // size, ends % size
    closing = int(closed.max())
    alike = valid is None and cache.alike
    first = int(cache.phase[0]) if alike else 0
    longest = first + length if alike else int(ends.max())
    if alike and longest <= size:
        return Frame(length, 1, 0, length, None, closed, phase, torch.zeros_like(phase), closing)
    count = -(-longest // size)
    if alike:
        return Frame(size, count, first, length, None, closed, phase, cache.phase, closing)
    steps = torch.arange(length, device=cache.phase.device).expand(len(tokens), -1)
    order = steps if valid is None else valid.cumsum(1) - 1
    most = max(1, int(tokens.max()))
    if longest <= size and (
        most == 1 or not strict
    ):  # no need to lie where the segment's slots are
        slots, size, count = order, most, 1
        begun = torch.zeros_like(phase)
    else:
        slots, begun = cache.phase[:, None] + order, cache.phase
    slots = slots if valid is None else slots.masked_fill(~valid, -1)
    return Frame(size, count, 0, length, slots, closed, phase, begun, closing)


def logarithmic(tokens: int, unit: int = 1) -> list[int]:
    """Lengths of the segments of a prefix: the binary expansion of its units, then the open rest.

    37 tokens -> 32, 4, 1 and 36 -> 32, 4: the last one is the online memory (arXiv 2602.24281, 4.2).
    """
    units, rest = divmod(tokens, unit)
    powers = [unit << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]
    return powers + ([rest] if rest else [])


def blocks(count: int, size: int, tokens: int = 2048) -> Iterator[tuple[int, int]]:
    """Runs of segments of about `tokens` tokens: what is scored and read at once."""
    step = max(1, tokens // size)
    for start in range(0, count, step):
        yield start, min(count, start + step)
