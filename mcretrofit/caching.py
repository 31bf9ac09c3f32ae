"""The read path: scan, summarise, score, weigh, read, close segments (arXiv 2602.24281, eq 4-5).

`y = base - online + (o * online + sum_i c_i M_i q)` for the cached heads and channels, where `online`
is their read of the open segment and o, c_i are an aggregator's weights. Pure but for the
`SegmentCache` that it is handed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from types import ModuleType
from typing import NamedTuple

import torch
from mcretrofit_kernels.cached_read import cached_read
from torch import Tensor

from mcretrofit import rules
from mcretrofit.aggregators import Reading, Weights
from mcretrofit.config import CachingConfig
from mcretrofit.dyadic import DyadicCache
from mcretrofit.errors import RetrofitError
from mcretrofit.gates import Gate
from mcretrofit.memories import Streams
from mcretrofit.memories._scan import kept, scan, scan_segments, wide
from mcretrofit.registry import load
from mcretrofit.routers import Asked, Opened
from mcretrofit.segments import Bank, Frame, SegmentCache, blocks, frame


class Plan:
    """One mixer's caching: its configuration, its gate, and the modules that the names mean."""

    def __init__(self, config: CachingConfig, gate: Gate, memory: ModuleType, heads: int) -> None:
        self.config, self.gate, self.memory, self.total = config, gate, memory, heads
        self.router = load("routers", config.router)
        self.aggregator = load("aggregators", config.preset.aggregator)
        self.options = {"top_k": config.top_k} if config.preset.aggregator == "ssc" else {}
        self.logarithmic = config.preset.segmentation == "logarithmic"
        # calibration looks at the scores and at what is visible through this
        self.watch: Callable[[Tensor, Tensor], None] | None = None
        # controls weigh segments in their own way through this: (weigh, reading, bank, opened)
        self.reroute: Callable[..., Weights] | None = None
        if self.logarithmic and config.init == "reset" and not memory.MERGES:
            kind = memory.__name__.rsplit(".", 1)[1]
            raise RetrofitError(
                f"loglinear with init reset has no way to merge the states of a {kind} memory; "
                "take --init carry_delta or carry"
            )

    @cached_property
    def all_heads(self) -> bool:
        return self.gate.heads == list(range(self.total))

    @cached_property
    def partial(self) -> bool:
        """Whether some channels of a cached head are left alone."""
        return bool((self.gate.mask == 0).any())

    def start(self, batch: int, device: torch.device) -> SegmentCache:
        """An empty cache of this plan's kind."""
        return (DyadicCache if self.logarithmic else SegmentCache).start(batch, device)

    def cached(self, x: Tensor) -> Tensor:
        """The cached heads of `x [B, T, H, ...]`."""
        return x if self.all_heads else x[:, :, self.gate.heads]

    def pick(self, streams: Streams, masked: bool) -> Streams:
        """The cached heads of all streams, their queries masked to the cached channels if asked."""
        picked = streams.map(self.cached)
        return picked._replace(q=self.gate.masked(picked.q)) if masked else picked


class Scanned(NamedTuple):
    """What the recurrence gave: reads in frame slots and the cached heads' running end states."""

    base: Tensor  # [B, F, H, V], the part that is never touched
    online: Tensor  # [B, F, H', V], the cached channels' read of the open segment
    ends: Tensor  # [B, S, H', K, V]
    state: Tensor  # [B, H, K, V]


def cached_scan(
    plan: Plan,
    streams: Streams,
    state: Tensor,
    cache: SegmentCache,
    x: Tensor | None,
    valid: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The op with caching: `(out [B, T, H, V], state)`; `cache` moves on by the tokens read."""
    streams = wide(streams)
    if cache.origin is None:
        cache.origin = plan.cached(state[:, None])[:, 0]
    laid = frame(cache, valid, streams.length, plan.config.segment, plan.logarithmic)
    framed = streams.map(laid.put)
    scanned = (_reset if plan.config.init == "reset" else _carry)(plan, framed, state, cache, laid)
    mixed = _mix(plan, plan.pick(framed, True), scanned, cache, laid, x, valid)
    if plan.partial:
        mixed = plan.cached(scanned.base) - scanned.online * (plan.config.init != "reset") + mixed
    out = mixed
    if not plan.all_heads:
        heads = torch.tensor(plan.gate.heads, device=mixed.device)
        out = scanned.base.index_copy(2, heads, mixed.to(scanned.base.dtype))
    return laid.take(out), scanned.state


def _carry(plan: Plan, framed: Streams, state: Tensor, cache: SegmentCache, laid: Frame) -> Scanned:
    """The model's own recurrence runs through; partly cached heads are read twice."""
    streams, heads = framed, state.shape[1]
    if plan.partial:
        extra = plan.pick(framed, True)
        streams = Streams(
            *(
                None if a is None else torch.cat([a, b], 2)
                for a, b in zip(framed, extra, strict=True)
            )
        )
        state = torch.cat([state, plan.cached(state[:, None])[:, 0]], 1)
    out, state, ends = scan_segments(plan.memory, streams, laid.size, state, "carry")
    base = out[:, :, :heads]
    if plan.partial:
        return Scanned(base, out[:, :, heads:], ends[:, :, heads:], state[:, :heads])
    return Scanned(base, plan.cached(base), plan.cached(ends), state)


def _reset(plan: Plan, framed: Streams, state: Tensor, cache: SegmentCache, laid: Frame) -> Scanned:
    """Cached channels start every segment empty; the rest runs through as before."""
    own = plan.pick(framed, True)
    start = cache.origin if cache.online is None else cache.online
    online, _, ends = scan_segments(plan.memory, own, laid.size, start, "reset")
    cache.online = _pick(torch.cat([ends, torch.zeros_like(ends[:, :1])], 1), laid.closed)
    if plan.partial:
        q = framed.q.clone()
        q[:, :, plan.gate.heads] = q[:, :, plan.gate.heads] * (1 - plan.gate.mask.to(q.dtype))
        base, state = scan(plan.memory, framed._replace(q=q), state)
        return Scanned(base, online, ends, state)
    rest = [h for h in range(plan.total) if h not in plan.gate.heads]
    base = online.new_zeros(*online.shape[:2], plan.total, online.shape[-1])
    if rest:
        out, kept_state = scan(plan.memory, framed.map(lambda s: s[:, :, rest]), state[:, rest])
        where = torch.tensor(rest, device=out.device)
        base, state = base.index_copy(2, where, out), state.index_copy(1, where, kept_state)
    return Scanned(base, online, ends, state)


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
    unit = plan.router.UNIT
    keys = plan.gate.unit(own.k) if unit else plan.gate.masked(own.k)
    asks = plan.gate.query(own.q, None if x is None else laid.put(x), unit, plan.router.USES_QUERY)
    folded = keys.unflatten(1, (count, size)), tokens.unflatten(1, (count, size))
    fresh = plan.router.summarise(*folded)
    before = torch.zeros_like(fresh)
    if cache.open_summary is not None:
        before = torch.cat([cache.open_summary[:, None], before[:, 1:]], 1)
    summaries = fresh + before
    places = None
    if plan.reroute is not None:
        places = (cache.counts * plan.config.segment + cache.phase)[:, None] + tokens.cumsum(1) - 1
    decay = _decay(own, cache, laid)
    written = _own(plan, scanned.ends, cache, decay, laid)
    index = cache.counts[:, None] + torch.arange(count, device=tokens.device)
    cache.open_summary = _pick(
        torch.cat([summaries, torch.zeros_like(summaries[:, :1])], 1), laid.closed
    )
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
        opened = Opened(keys[:, cut], tokens[:, cut], before[:, segment], min(size, stop - start))
        if places is not None:
            opened = opened._replace(places=places[:, cut])
        parts.append(_read(plan, bank, Asked(asks[:, cut], own.q[:, cut], online), opened, closing))
    return torch.cat(parts, 1)


def _decay(own: Streams, cache: SegmentCache, laid: Frame) -> Tensor | None:
    """Total log decay of each segment so far `[B, S, H']` or `[B, S, H', K]`."""
    if own.decay is None:
        return None
    total = own.decay.unflatten(1, (laid.count, laid.size)).sum(2)
    if cache.open_decay is not None:
        total = torch.cat([total[:, :1] + cache.open_decay[:, None], total[:, 1:]], 1)
    cache.open_decay = _pick(torch.cat([total, torch.zeros_like(total[:, :1])], 1), laid.closed)
    return total


def _own(
    plan: Plan, ends: Tensor, cache: SegmentCache, decay: Tensor | None, laid: Frame
) -> Tensor:
    """What is cached of each segment: its end state, or under `carry_delta` what it wrote itself."""
    if plan.config.init != "carry_delta":
        return ends
    left = kept(torch.cat([cache.origin[:, None], ends[:, :-1]], 1), decay)
    cache.origin = _pick(torch.cat([cache.origin[:, None], ends], 1), laid.closed)
    return ends - left


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
    held, closed = cache.held, int(laid.closed.max())
    if closed:
        cache.append(written[:, :closed], summaries[:, :closed], laid.closed)
    for first, last in blocks(laid.count, laid.size):
        seen = held + last - 1
        rows = index[:, first:last].repeat_interleave(laid.size, 1)
        bank = cache.bank(rows, min(seen, cache.held)) if seen and cache.held else None
        yield first * laid.size, last * laid.size, bank, None


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
    adds, size = plan.config.init != "carry", laid.size
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
        cache.push(written[:, s], summaries[:, s], total, rows, adds)
        yield stop - 1, stop, cache.bank(tail, rows), rows


def _read(plan: Plan, bank: Bank, asked: Asked, opened: Opened, closing: Tensor | None) -> Tensor:
    """Weigh and read `[B, T, H', V]`; in rows `closing [B]` the newest block is the online memory."""
    if closing is not None:
        asked, opened = _merged(plan, bank, asked, opened, closing)
    if plan.watch is not None:
        plan.watch(_surprise(plan, bank, asked), bank.visible & opened.valid[..., None])
        return asked.online
    reading = Reading(bank.visible, asked.q.shape[2], lambda: _logits(plan, bank, asked, opened))
    weigh = partial(plan.aggregator.weigh, **plan.options)
    weights = weigh(reading) if plan.reroute is None else plan.reroute(weigh, reading, bank, opened)
    read = cached_read(bank.states, asked.q, weights.cached, weights.indices)
    return weights.online[..., None] * asked.online + read


def _merged(
    plan: Plan, bank: Bank, asked: Asked, opened: Opened, closing: Tensor
) -> tuple[Asked, Opened]:
    """The newest closed block taken for the open segment: its summary, and under reset its state."""
    rows = torch.arange(len(closing), device=closing.device)
    newest = bank.newest
    here = closing[:, None, None, None]
    if plan.config.init == "reset":
        alone = asked.q.new_ones(*asked.q.shape[:3], 1)
        merged = cached_read(bank.states[rows, newest][:, None], asked.q, alone)
        asked = asked._replace(online=torch.where(here, merged, asked.online))
    before = torch.where(here, bank.summaries[rows, newest][:, None], opened.before)
    keys = opened.keys.masked_fill(here, 0)
    return asked, Opened(keys, opened.valid & ~closing[:, None], before, 1, opened.places)


def _logits(plan: Plan, bank: Bank, asked: Asked, opened: Opened) -> tuple[Tensor, Tensor]:
    config, gate = plan.config, plan.gate
    if config.rule == "z":
        scores = _surprise(plan, bank, asked)
        heat = rules.Z_TEMPERATURE if config.temperature is None else config.temperature
        cached, online = rules.z(scores, gate.mean, gate.std, config.margin, heat, config.shared)
    else:
        heat = plan.router.TEMPERATURE if config.temperature is None else config.temperature
        cached, online = rules.plain(*plan.router.score(asked, bank, opened), heat)
    return cached, gate.biased(online)


def _surprise(plan: Plan, bank: Bank, asked: Asked) -> Tensor:
    """The scores that the z rule looks at `[B, T, H', N]`."""
    scores, _ = plan.router.score(asked, bank, None)
    compared = plan.config.relative and plan.router.POSITIVE
    return rules.relative(scores, bank.visible) if compared else scores


def _pick(stack: Tensor, at: Tensor) -> Tensor:
    """Entry `at[b]` of `[B, S, ...]` for every row."""
    return stack[torch.arange(len(at), device=at.device), at]
