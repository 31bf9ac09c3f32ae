"""The read path: scan, summarise, score, weigh, read, close segments (arXiv 2602.24281, eq 4-5).

`y = base - online + (o * online + sum_i c_i M_i q)` for the cached heads and channels, where `online`
is their read of the open segment and o, c_i are an aggregator's weights. Pure but for the
`SegmentCache` that it is handed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.dyadic import DyadicCache
from mcretrofit.memories import Streams
from mcretrofit.memories._networks import Layer, packed, unpacked
from mcretrofit.memories._scan import (
    State,
    kept,
    weights,
    wide,
)
from mcretrofit.plan import Plan
from mcretrofit.reads import read
from mcretrofit.recurrence import Scanned, after, pick, run
from mcretrofit.routers import Asked, Opened
from mcretrofit.segments import Bank, Frame, SegmentCache, blocks, frame


def cached_scan(
    plan: Plan,
    streams: Streams,
    state: State,
    cache: SegmentCache,
    x: Tensor | None,
    valid: Tensor | None,
) -> tuple[Tensor, State]:
    """The op with caching: `(out [B, T, H, V], state)`; `cache` moves on by the tokens read."""
    streams = wide(streams)
    plan.check(*streams.k.shape[2:])
    if plan.differs and cache.origin is None:
        cache.origin = weights(plan.held(state), plan.memory)
    laid = frame(cache, valid, streams.length, plan.config.segment, plan.logarithmic)
    framed = streams.map(laid.put)
    scanned = run(plan, framed, state, cache, laid)
    mixed = _mix(plan, plan.pick(framed, True), scanned, cache, laid, x, valid)
    if plan.partial:
        rest = plan.cached(scanned.base)
        mixed = (rest if scanned.under is None else rest - scanned.under) + mixed
    out = mixed
    if not plan.all_heads:
        heads = torch.tensor(plan.gate.heads, device=mixed.device)
        out = scanned.base.index_copy(2, heads, mixed.to(scanned.base.dtype))
    return laid.take(out), scanned.state


def _mix(
    plan: Plan,
    own: Streams,
    scanned: Scanned,
    cache: SegmentCache,
    laid: Frame,
    x: Tensor | None,
    valid: Tensor | None,
) -> Tensor:
    """Close segments, then let every token read what was closed before it: `[B, F, H', V]`."""
    count, size = laid.count, laid.size
    tokens = torch.ones(own.q.shape[0], laid.length, dtype=torch.bool, device=own.q.device)
    tokens = laid.put(tokens if valid is None else valid)
    unit, first = plan.router.UNIT, plan.directions
    keys, put = plan.gate.key(own.k, unit, first), None if x is None else laid.put(x)
    asks = plan.gate.query(own.q, put, unit, plan.router.USES_QUERY, first)
    places = (cache.counts * plan.config.segment + cache.phase)[:, None] + tokens.cumsum(1) - 1
    part = plan.part(places)
    looked = (keys, tokens) if part is None else (keys, tokens, part)
    fresh = plan.router.summarise(*(x.unflatten(1, (count, size)) for x in looked))
    before = torch.zeros_like(fresh)
    if cache.open_summary is not None:
        before = torch.cat([cache.open_summary[:, None], before[:, 1:]], 1)
    summaries = fresh if cache.open_summary is None else plan.merge(before, fresh)
    opened = _opened(plan, Opened(keys, tokens, keys, size, places, part=part), cache, laid)
    began = _began(plan, cache, scanned.ends) if plan.differs else None
    since, decay = _decay(own, cache, laid)
    written = packed(_own(plan, scanned.ends, began, cache, decay, laid))
    index = cache.counts[:, None] + torch.arange(count, device=tokens.device)
    cache.open_summary = after(summaries, laid, torch.zeros_like(fresh[:, 0]))
    cache.settle(laid)
    parts = []
    walk = _walk_dyadic if plan.logarithmic else _walk
    for start, stop, bank, closing in walk(cache, written, summaries, decay, index, laid, plan):
        cut = slice(start, stop)
        online = scanned.online[:, cut]
        if bank is None:
            parts.append(online)
            continue
        segment = slice(start // size, -(-stop // size))
        left = None
        if plan.own and plan.differs:
            left = _left(plan, own, since, began, cut, segment)
        elif plan.own:
            left = online - scanned.alone[:, cut]
        part = opened.cut(cut, before[:, segment], min(size, stop - start))
        layer = None if scanned.layer is None else partial(_cut, scanned.layer, cut, laid.width)
        asked = Asked(asks[:, cut], own.q[:, cut], online, layer)
        bank = bank._replace(states=unpacked(bank.states, scanned.ends))
        parts.append(read(plan, bank, asked, part, closing, left))
    return torch.cat(parts, 1)


def _cut(layer: Layer, cut: slice, width: int, i: int, x: Tensor) -> Tensor:
    """A layer of the running weights of some tokens alone, out of `width`."""
    more = (0, 0) * 2 + (cut.start, width - cut.stop)
    return layer(i, F.pad(x, more))[:, cut]


def _began(plan: Plan, cache: SegmentCache, ends: Tensor) -> Tensor:
    """The states `[B, S, H', K, V]` before the segments that end with `ends`; zero where what is
    cached of a head is no difference."""
    began = cache.origin[:, None]
    began = torch.cat([began, ends[:, :-1]], 1) if ends.shape[1] > 1 else began
    delta = plan.begins("carry_delta", 2)
    return began if delta is True else began * delta


def _opened(plan: Plan, opened: Opened, cache: SegmentCache, laid: Frame) -> Opened:
    """With what the open segments hold of their own, where the plan looks at it."""
    if not plan.own:
        return opened
    segment, keys = plan.config.segment, opened.keys
    share = (opened.places % segment + 1 - plan.near).clamp_min(0).to(keys.dtype) / segment
    near = None
    if plan.sums:
        near = cache.remember(keys, laid, opened.valid.sum(1), plan.near)
    return opened._replace(share=share, lag=plan.near, near=near, begun=laid.begun)


def _left(
    plan: Plan, own: Streams, since: Tensor | None, began: Tensor, cut: slice, segment: slice
) -> Tensor:
    """The reads `[B, T, H', V]` of what is left of the segments' start states."""
    q = own.q[:, cut]
    if since is not None:
        since = since - own.decay if getattr(plan.memory, "READS_FIRST", False) else since
        kept_on = since[:, cut].exp()
        q = q * (kept_on if kept_on.dim() == q.dim() else kept_on[..., None])
    starts = began[:, segment]
    q = q.unflatten(1, (starts.shape[1], -1)).transpose(2, 3)
    return (q @ starts).transpose(2, 3).flatten(1, 2)


def _decay(own: Streams, cache: SegmentCache, laid: Frame) -> tuple[Tensor | None, Tensor | None]:
    """Log decay since the segment's start of every token `[B, F, H']` or `[B, F, H', K]`, and of
    each segment so far `[B, S, ...]`."""
    if own.decay is None:
        return None, None
    since = own.decay.unflatten(1, (laid.count, laid.size)).cumsum(2)
    if cache.open_decay is not None:
        since = torch.cat([since[:, :1] + cache.open_decay[:, None, None], since[:, 1:]], 1)
    total = since[:, :, -1]
    cache.open_decay = after(total, laid, torch.zeros_like(total[:, 0]))
    return since.flatten(1, 2), total


def _own(
    plan: Plan,
    ends: State,
    began: Tensor | None,
    cache: SegmentCache,
    decay: Tensor | None,
    laid: Frame,
) -> State:
    """What is cached of each segment: its end state, or under `carry_delta` what it wrote itself."""
    if began is None or not laid.closing:
        # what is not closed is not cached
        return ends
    cache.origin = pick(torch.cat([cache.origin[:, None], ends], 1), laid.closed)
    return ends - kept(began, decay)


def _walk(
    cache: SegmentCache,
    written: Tensor,
    summaries: Tensor,
    decay: Tensor | None,
    index: Tensor,
    laid: Frame,
    plan: Plan,
) -> Iterator[tuple[int, int, Bank | None, None]]:
    """Constant segments: all are closed first, then runs of them read what came before."""
    held, closed = cache.held, laid.closing
    if closed:
        cache.append(written[:, :closed], summaries[:, :closed], laid.closed)
    for first, last in blocks(laid.count, laid.size):
        seen = held + last - 1
        rows = index[:, first:last].repeat_interleave(laid.size, 1)
        bank = cache.bank(rows, min(seen, cache.held)) if seen and cache.held else None
        yield first * laid.size, last * laid.size, bank, None


def _piles(plan: Plan) -> bool | Tensor:
    """Whether the state of a block of segments is what its halves wrote, by head where that differs;
    under `carry` it is the later running state."""
    carried = plan.begins("carry", 2)
    return not carried if isinstance(carried, bool) else ~carried


def _walk_dyadic(
    cache: DyadicCache,
    written: Tensor,
    summaries: Tensor,
    decay: Tensor | None,
    index: Tensor,
    laid: Frame,
    plan: Plan,
) -> Iterator[tuple[int, int, Bank | None, Tensor | None]]:
    """Logarithmic segments: the token that closes one already reads the merged blocks."""
    adds, size = _piles(plan), laid.size
    for s in range(laid.count):
        rows, start, stop = laid.closed > s, s * size, (s + 1) * size
        tail = index[:, s : s + 1]
        if not rows.any():
            yield start, stop, cache.bank(tail.expand(-1, size)) if cache.held else None, None
            continue
        if size > 1:
            yield (
                start,
                stop - 1,
                cache.bank(tail.expand(-1, size - 1)) if cache.held else None,
                None,
            )
        total = None if decay is None else decay[:, s]
        cache.push(written[:, s], summaries[:, s], total, rows, adds, plan.merge)
        yield stop - 1, stop, cache.bank(tail, rows), rows
