"""The oracle of the read path: one token at a time, every state built alone, nothing kept."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from mcretrofit import rules
from mcretrofit.aggregators import Reading
from mcretrofit.memories import Streams
from mcretrofit.memories._scan import State, init_state, naive, tree, weights
from mcretrofit.memories._scan import read as read_all
from mcretrofit.plan import Plan
from mcretrofit.routers import Asked, Opened
from mcretrofit.segments import Bank, logarithmic

Block = tuple[int, int]


def mix(own: Tensor, online: Tensor, cached: Tensor, states: Tensor) -> Tensor:
    """States `[B, N, H, ...]` and the online one by weights `[B, H, N]` and `[B, H]`."""
    return own[..., None, None] * online + torch.einsum("bhn,bnhkv->bhkv", cached, states)


class Oracle:
    """What `cached_scan` has to give for `streams [B, T, ...]` under a plan, by definition."""

    def __init__(self, plan: Plan, streams: Streams, x: Tensor | None = None) -> None:
        self.plan, self.streams = plan, streams
        gate, self.heads = plan.gate, plan.gate.heads
        self.own = streams.heads(self.heads)
        self.mask = gate.mask.to(self.own.q.dtype)
        self.q = self.own.q * self.mask
        unit = plan.router.UNIT
        self.keys = gate.unit(self.own.k) if unit else gate.masked(self.own.k)
        self.u = gate.query(self.q, x, unit, plan.router.USES_QUERY)
        if unit and plan.directions:
            self._narrow(plan.directions, x)
        # by instance: a cache over methods would keep every oracle alive
        self.alone = lru_cache(None)(self._alone)

    def _narrow(self, first: int, x: Tensor | None) -> None:
        """Keys and questions in the first directions alone, each by itself."""
        gate, router = self.plan.gate, self.plan.router
        kept, gate.whiten = gate.whiten, None
        asked = gate.query(self.q, x, True, router.USES_QUERY)
        gate.whiten = kept
        count, width = self.mask.shape
        matrix = torch.eye(width).repeat(count, 1, 1) if kept is None else kept
        matrix = matrix[:, :, :first].to(asked.dtype)
        pairs = [(asked[:, :, h] @ m, self.keys[:, :, h] @ m) for h, m in enumerate(matrix)]
        asked, self.keys = (torch.stack(one, 2) for one in zip(*pairs, strict=True))
        self.u = asked / asked.norm(dim=-1, keepdim=True)

    def out(self) -> Tensor:
        """`[B, T, H, V]`."""
        base, _ = naive(self.plan.memory, self.streams)
        rows = [self._token(t) for t in range(self.streams.length)]
        return base.index_copy(2, torch.tensor(self.heads), torch.stack(rows, 1))

    def blocks(self, t: int) -> list[Block]:
        """The segments of the prefix that ends with token t; the last one is open."""
        size = self.plan.config.segment
        if self.plan.logarithmic:
            stops = list(accumulate(logarithmic(t + 1, size)))
        else:
            stops = [*range(size, t + 1, size), t + 1]
        return list(zip([0, *stops], stops, strict=False))

    def _alone(self, a: int, b: int) -> State:
        """The state after tokens a .. b - 1 from an empty start, `[B, H', ...]`."""
        if a == b:
            return init_state(self.own, self.plan.memory)
        token = self.own.map(lambda s: s[:, b - 1 : b])
        return self.plan.memory.step(token, self.alone(a, b - 1))[1]

    def after(self, a: int, b: int) -> State:
        """The matrix or network after tokens a .. b - 1 from an empty start."""
        return weights(self.alone(a, b), self.plan.memory)

    def state(self, a: int, b: int) -> State:
        """What is cached of the segment a .. b - 1."""
        init = self.plan.config.init
        if init == "reset" or (init == "carry_delta" and self.plan.network):
            return self.after(a, b)
        if init == "carry":
            return self.after(0, b)
        return self.after(0, b) - self.left(a, b)

    def _read(self, t: int, state: State, q: Tensor) -> Tensor:
        one = tree(lambda s: s[:, None], state)
        return read_all(one, q[:, t : t + 1], self.plan.memory)[:, 0, 0]

    def _token(self, t: int) -> Tensor:
        """The cached heads' read of one token, `[B, H', V]`."""
        seen = t if getattr(self.plan.memory, "READS_FIRST", False) else t + 1
        # a network is never cached in part
        untouched = 0
        if not self.plan.network:
            untouched = self._read(t, self.after(0, seen), self.own.q * (1 - self.mask))
        *closed, (start, _) = self.blocks(t)
        reset = self.plan.config.init == "reset"
        running = self.after(start if reset else 0, seen)
        online = self._read(t, running, self.q)
        if not closed:
            return untouched + online
        states = tree(lambda *s: torch.stack(s, 1), *(self.state(a, b) for a, b in closed))
        loud = self.loud(t, closed, states) if self.plan.own else None
        own, cached = self.weights(t, closed, states, online, loud)
        if loud is not None:
            share = 1 / (1 + torch.exp(-loud))
            own_read = self._read(t, self.after(start, seen), self.q) if self.plan.network else 0
            left = online - own_read
            if not self.plan.network:
                running = running - share[..., None, None] * self.left(start, seen)
                left = self._read(t, self.left(start, seen), self.q)
            online = online - share[..., None] * left
        if self.plan.aggregator.MIXES == "states":
            mixed = tree(lambda one, many: mix(own, one, cached, many), running, states)
            return untouched + self._read(t, mixed, self.q)
        # a network hands its query through, but only once for all
        skip = self.q[:, t] * (isinstance(states, tuple) and len(states) > 1)
        every = [tree(lambda s, i=i: s[:, i], states) for i in range(cached.shape[-1])]
        reads = torch.stack([self._read(t, s, self.q) - skip for s in every], -1)
        mixed = own[..., None] * (online - skip) + (reads * cached[:, :, None]).sum(-1)
        return untouched + skip + mixed

    def left(self, a: int, b: int) -> Tensor:
        """What is left before token b of the state at a."""
        left = self.after(0, a)
        if self.own.decay is None:
            return left
        total = self.own.decay[:, a:b].sum(1)
        return left * total.view(*total.shape, *[1] * (4 - total.dim())).exp()

    def loud(self, t: int, closed: list[Block], states: State) -> Tensor:
        """The logit `[B, H']` of what the open segment wrote until shortly before token t."""
        plan, config = self.plan, self.plan.config
        start, lag = closed[-1][1], min(8, config.segment // 4)
        parts = [*closed, (start, max(start, t + 1 - lag))]
        sums = [self.summary(a, b) for a, b in parts]
        bank = Bank(states, torch.cat(sums, 1), *3 * (torch.ones(1, 1, len(parts)).bool(),))
        asked = Asked(self.u[:, t : t + 1], self.q[:, t : t + 1], self.q[:, t : t + 1])
        scores = plan.router.score(asked, bank, None)[0][:, 0]
        cached, own = scores[..., :-1], scores[..., -1]
        missing = 1 - max(0, t + 1 - start - lag) / config.segment
        mean, std = plan.gate.mean, plan.gate.std
        usual = cached.mean(-1).clamp_min(rules.TINY) if config.relative else mean
        if getattr(plan.router, "ADDS", True):
            own = (own + missing * usual) / (usual if config.relative else 1)
        elif config.relative:
            own = own / ((usual * len(closed) + own) / (len(closed) + 1))
        surprise = (own - mean) / std
        if config.shared:
            surprise = surprise.mean(1, keepdim=True).expand_as(surprise)
        heat = rules.Z_TEMPERATURE if config.temperature is None else config.temperature
        logit = plan.gate.heated(heat) * (surprise - config.margin)
        return torch.where(logit > 0, 4 * torch.tanh(logit / 4) + 0.01 * logit, logit)

    def part(self, a: int, b: int) -> Tensor | None:
        """In which part of its segment each of the tokens a .. b - 1 lies, `[B, b - a]`."""
        segment, router = self.plan.config.segment, self.plan.router
        count = segment if hasattr(router, "PLACES") else getattr(router, "PARTS", None)
        if count is None:
            return None
        return torch.tensor([[j % segment * count // segment for j in range(a, b)]] * len(self.q))

    def summary(self, a: int, b: int) -> Tensor:
        """What the router keeps of the tokens a .. b - 1."""
        keys, part = self.keys[:, None, a:b], self.part(a, b)
        valid = torch.ones(keys.shape[:3], dtype=torch.bool)
        return self.plan.router.summarise(keys, valid, *([] if part is None else [part[:, None]]))

    def weights(
        self,
        t: int,
        closed: list[Block],
        states: State,
        online: Tensor,
        loud: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Weights of the online read `[B, H']` and of every closed segment `[B, H', N]`."""
        plan, count = self.plan, len(closed)
        cached, own = self.logits(t, closed, states, online)
        own = own if loud is None else own + torch.log1p(loud.exp())
        visible = torch.ones(len(online), 1, count, dtype=torch.bool)
        reading = Reading(visible, len(self.heads), lambda: (cached[:, None], own[:, None]))
        given = plan.aggregator.weigh(reading, **plan.options)
        every = given.cached.to(online.dtype)
        if given.indices is not None:
            every = every.new_zeros(*every.shape[:3], count).scatter(-1, given.indices, every)
        return given.online[:, 0].to(online.dtype), every[:, 0]

    def logits(
        self, t: int, closed: list[Block], states: State, online: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits `[B, H', N]` and `[B, H']` of one token, by its router and rule."""
        plan, config, router = self.plan, self.plan.config, self.plan.router
        start = closed[-1][1]
        cut, length, rows = slice(start, t + 1), t + 1 - start, len(online)
        summaries = torch.cat([self.summary(a, b) for a, b in closed], 1)
        visible = torch.ones(rows, length, len(closed), dtype=torch.bool)
        index = torch.full((rows, length), t // config.segment)
        number = torch.tensor([[(b - 1) // config.segment for _, b in closed]])
        bank = Bank(states, summaries, visible, index, number)
        every = online[:, None].expand(-1, length, -1, -1)
        asked = Asked(self.u[:, cut], self.q[:, cut], every)
        valid = torch.ones(rows, length, dtype=torch.bool)
        opened = Opened(self.keys[:, cut], valid, torch.zeros_like(summaries[:, :1]), length)
        opened = opened._replace(part=self.part(start, t + 1))
        plain = config.rule == "plain"
        scores, own = router.score(asked, bank, opened if plain else None)
        if plain:
            heat = router.TEMPERATURE if config.temperature is None else config.temperature
            heat = plan.gate.heated(heat)
            each = heat if isinstance(heat, float) else heat[:, None]
            cached, own = each * scores[:, -1], heat * own[:, -1]
        else:
            heat = rules.Z_TEMPERATURE if config.temperature is None else config.temperature
            last = scores[:, -1]
            if config.relative and router.POSITIVE:
                last = last / last.mean(-1, keepdim=True).clamp_min(rules.TINY)
            surprise = (last - plan.gate.mean[:, None]) / plan.gate.std[:, None]
            if config.shared:
                surprise = surprise.mean(1, keepdim=True).expand_as(surprise)
            heat = plan.gate.heated(heat)
            each = heat if isinstance(heat, float) else heat[:, None]
            rise = rules.STEEP * math.log(max(1, len(closed) / rules.FEW))
            rise /= math.sqrt(len(self.heads)) if config.shared else 1
            logits = each * (surprise - config.margin - rise)
            bent = 4 * torch.tanh(logits / 4) + 0.01 * logits
            cached = torch.where(logits > 0, bent, logits)
            own = torch.zeros_like(scores[:, -1, :, 0])
        return cached, own if plan.gate.bias is None else own + plan.gate.bias
