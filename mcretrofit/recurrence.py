"""Run a mixer's recurrence: the model's own, and what the cached heads' segments begin with.

Under `carry` and `carry_delta` the online memory is the model's running state; under `reset` every
segment begins from an empty one. Heads of one mixer may begin in different ways.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mcretrofit.memories import Streams
from mcretrofit.memories._networks import Layer
from mcretrofit.memories._scan import (
    State,
    init_state,
    scan,
    scan_segments,
    tree,
    weights,
)
from mcretrofit.memories._tape import Taping
from mcretrofit.plan import Plan
from mcretrofit.segments import Frame, SegmentCache


class Scanned(NamedTuple):
    """What the recurrence gave: reads in frame slots and the cached heads' running end states."""

    base: Tensor  # [B, F, H, V], the part that is never touched
    online: Tensor  # [B, F, H', V], the cached channels' read of the open segment
    ends: State  # [B, S, H', K, V], or the weights of networks
    state: State  # [B, H, ...]
    alone: Tensor | None = (
        None  # [B, F, H', V], what the open segment's own writes give by themselves
    )
    layer: Layer | None = None  # the cached heads' running weights, a layer at a time
    under: Tensor | None = None  # [B, F, H', V], what the cached channels put into `base`


def run(plan: Plan, framed: Streams, state: State, cache: SegmentCache, laid: Frame) -> Scanned:
    """Reads in frame slots, states at segments' ends, and the running state after all tokens."""
    if set(plan.inits) == {"reset"}:
        return _reset(plan, framed, state, cache, laid)
    return (_both if plan.afresh else _carry)(plan, framed, state, cache, laid)


def _carry(plan: Plan, framed: Streams, state: State, cache: SegmentCache, laid: Frame) -> Scanned:
    """The model's own recurrence runs through; partly cached heads are read twice."""
    streams = framed
    if plan.partial:
        extra = plan.pick(framed, True)
        joined = (
            None if a is None else torch.cat([a, b], 2) for a, b in zip(framed, extra, strict=True)
        )
        streams = Streams(*joined)
        state = tree(lambda s: torch.cat([s, plan.held(s)], 1), state)
    memory = Taping(plan.memory) if plan.blends else plan.memory
    out, state, ends = scan_segments(memory, streams, laid.size, state, "carry")
    ends, base = weights(ends, plan.memory), out[:, :, : plan.total]
    if plan.partial:
        own = slice(plan.total, None)
        state = tree(lambda s: s[:, : plan.total], state)
        online = out[:, :, own]
        return Scanned(base, online, tree(lambda s: s[:, :, own], ends), state, under=online)
    layer = plan.among(memory.read) if plan.blends else None
    return Scanned(base, plan.cached(base), tree(plan.cached, ends), state, layer=layer)


def _alone(
    plan: Plan, own: Streams, state: State, cache: SegmentCache, laid: Frame
) -> tuple[Tensor, State, Layer | None]:
    """Reads, weights at the ends and layers of `plan.afresh`, every segment begun from nothing."""
    if len(plan.afresh) < len(plan.inits):
        own = own.heads(plan.afresh)
    start = tree(plan.alone, plan.held(state)) if cache.online is None else cache.online
    memory = Taping(plan.memory) if plan.blends else plan.memory
    online, _, ends = scan_segments(memory, own, laid.size, start, "reset")
    cache.online = after(ends, laid, init_state(own, plan.memory))
    return online, weights(ends, plan.memory), memory.read if plan.blends else None


def _reset(plan: Plan, framed: Streams, state: State, cache: SegmentCache, laid: Frame) -> Scanned:
    """Cached channels start every segment afresh; the rest runs through as before."""
    online, ends, layer = _alone(plan, plan.pick(framed, True), state, cache, laid)
    if plan.partial:
        q = framed.q.clone()
        q[:, :, plan.gate.heads] = q[:, :, plan.gate.heads] * (1 - plan.gate.mask.to(q.dtype))
        base, state = scan(plan.memory, framed._replace(q=q), state)
        return Scanned(base, online, ends, state)
    rest = [h for h in range(plan.total) if h not in plan.gate.heads]
    base = online.new_zeros(*online.shape[:2], plan.total, online.shape[-1])
    if rest:
        out, ran = scan(plan.memory, framed.heads(rest), tree(lambda s: s[:, rest], state))
        where = torch.tensor(rest, device=out.device)
        base = base.index_copy(2, where, out)
        state = tree(lambda s, new: s.index_copy(1, where, new), state, ran)
    return Scanned(base, online, ends, state, layer=layer)


def _both(plan: Plan, framed: Streams, state: State, cache: SegmentCache, laid: Frame) -> Scanned:
    """All heads run through, and what segments of `plan.afresh` write is written once more, afresh:
    networks cannot be subtracted, and heads under `reset` read nothing else."""
    reads, ends, layer = _alone(plan, plan.pick(framed, True), state, cache, laid)
    carried = _carry(plan, framed, state, cache, laid)
    some = torch.tensor(plan.afresh, device=reads.device)
    alone = carried.online.index_copy(2, some, reads)
    ends = tree(lambda s, new: s.index_copy(2, some, new), carried.ends, ends)
    both = carried._replace(ends=ends, alone=alone)
    reset = plan.begins("reset", 1)
    if reset is False:
        return both

    def mixed(i: int, x: Tensor) -> Tensor:
        through = carried.layer(i, x)
        afresh = through.index_copy(2, some, layer(i, x[:, :, some]))
        return torch.where(reset, afresh, through)

    online = torch.where(reset, alone, carried.online)
    return both._replace(online=online, layer=mixed if plan.blends else None)


def after(sums: State, laid: Frame, fresh: State) -> State:
    """The open segment's running sum (or state) after this call, of those of all its segments
    `[B, S, ...]`; `fresh` where it has no token yet."""
    if not laid.closing:
        return tree(lambda s: s[:, 0], sums)
    return tree(lambda s, f: pick(torch.cat([s, f[:, None]], 1), laid.closed), sums, fresh)


def pick(stack: Tensor, at: Tensor) -> Tensor:
    """Entry `at[b]` of `[B, S, ...]` for every row."""
    return stack[torch.arange(len(at), device=at.device), at]
