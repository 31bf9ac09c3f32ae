"""What the laws share: combinations of all folders, caching without a model, tiny models."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from typing import NamedTuple

import torch
from test_families import build as build
from test_families import near as near
from test_families import tokens as tokens
from torch import Tensor

from mcretrofit import registry
from mcretrofit.caching import cached_scan
from mcretrofit.config import INITS, VARIANTS, CachingConfig
from mcretrofit.gates import Gate
from mcretrofit.memories import Streams
from mcretrofit.memories._scan import init_state
from mcretrofit.plan import Plan
from mcretrofit.retrofit import Cover, every_head
from mcretrofit.rules import RULES
from mcretrofit.segments import SegmentCache

SEGMENT, HEADS, KEYS, WIDTH = 8, 2, 16, 6
MEMORIES = registry.names("memories")


class Case(NamedTuple):
    """One way to cache: names of a memory, a variant, ..., which heads, a trained gate or none."""

    memory: str
    variant: str
    router: str
    init: str
    rule: str
    cover: str  # `all` heads, `one` head, half of the channels of one head (`part`)
    gated: bool

    def __str__(self) -> str:
        return "-".join([*self[:-1], "gated" if self.gated else "bare"])

    @property
    def config(self) -> CachingConfig:
        return CachingConfig(
            variant=self.variant,
            segment=SEGMENT,
            router=self.router,
            init=self.init,
            rule=self.rule,
            margin=0.25,
            gate=self.gated,
        )


def sound(case: Case) -> bool:
    """Whether the combination exists: some states cannot be merged, networks not be split."""
    memory = registry.load("memories", case.memory)
    network = hasattr(memory, "read")
    if VARIANTS[case.variant].segmentation == "logarithmic" and not memory.MERGES:
        allowed = ("carry",) if network else ("carry", "carry_delta")
        return case.init in allowed and not (network and case.cover == "part")
    return not (network and case.cover == "part")


def cases(count: int, seed: int, **fixed: object) -> list[Case]:
    """`count` combinations, drawn so that every value of every field comes up in turn."""
    fields = {
        "memory": MEMORIES,
        "variant": list(VARIANTS),
        "router": registry.names("routers"),
        "init": list(INITS),
        "rule": list(RULES),
        "cover": ["all", "one", "part"],
        "gated": [False, True],
    }
    fields |= {name: [value] for name, value in fixed.items()}
    every = [case for case in map(Case._make, product(*fields.values())) if sound(case)]
    random.Random(seed).shuffle(every)
    chosen: list[Case] = []
    while every and len(chosen) < count:
        # the next one is that which brings the most values seen least
        used = [value for case in chosen for value in enumerate(case)]
        best = min(every, key=lambda case: sum(used.count(value) for value in enumerate(case)))
        every.remove(best)
        chosen.append(best)
    return chosen


def example(memory: str, length: int, seed: int = 0, rows: int = 2, **how: str) -> Streams:
    """The memory's own example in float64."""
    torch.manual_seed(seed)
    module = registry.load("memories", memory)
    return double(module.example(rows, length, HEADS, KEYS, **how))


def double(streams: Streams, dtype: torch.dtype = torch.float64) -> Streams:
    """The streams and first weights in another dtype."""
    inner = streams.inner
    if inner is not None:
        inner = inner._replace(start=tuple(w.to(dtype) for w in inner.start))
    return streams.map(lambda s: s.to(dtype))._replace(inner=inner)


def inputs(length: int, rows: int = 2) -> Tensor:
    """Hidden states `[B, T, D]` for a gate."""
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(5)).double()


def covered(case: Case, heads: int = HEADS, keys: int = KEYS) -> Cover:
    """The case's heads and channels, with statistics that are not the neutral ones."""
    chosen = list(range(heads)) if case.cover == "all" else [heads - 1]
    mask = torch.ones(len(chosen), keys)
    if case.cover == "part":
        mask[:, 1::2] = 0
    count = len(chosen)
    return Cover(
        chosen, heads, mask, torch.linspace(0.1, 0.3, count), torch.linspace(0.4, 0.6, count)
    )


def plan(case: Case, **changes: object) -> Plan:
    """The case's plan for `HEADS` heads of `KEYS` channels, its gate trained where it has one."""
    cover = covered(case)
    gate = Gate(cover.heads, KEYS, WIDTH if case.gated else 0)
    for name in ("mask", "mean", "std"):
        getattr(gate, name).copy_(getattr(cover, name))
    stir(gate)
    memory = registry.load("memories", case.memory)
    return Plan(case.config.replace(**changes), gate, memory, HEADS)


def stir(gate: Gate) -> None:
    """Give a gate's parameters values, as training would."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)


def read(
    some: Plan,
    streams: Streams,
    sizes: Sequence[int] = (),
    x: Tensor | None = None,
    cache: SegmentCache | None = None,
) -> tuple[Tensor, Tensor, SegmentCache]:
    """`(out, state, cache)` of the streams, read in pieces of `sizes` (one, if there are none)."""
    state = init_state(streams, some.memory)
    cache = some.start(len(streams.q), streams.q.device) if cache is None else cache
    x = x if some.gate.weight is not None else None
    outs = []
    for a, b in spans(sizes or [streams.length]):
        part = streams.map(lambda s, a=a, b=b: s[:, a:b])
        out, state = cached_scan(some, part, state, cache, None if x is None else x[:, a:b], None)
        outs.append(out)
    return torch.cat(outs, 1), state, cache


def spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """`(start, stop)` of pieces that follow each other."""
    stops = list(accumulate(sizes))
    return zip([0, *stops], stops, strict=False)


def covers(model: torch.nn.Module, case: Case) -> dict[str, Cover]:
    """The case's heads and channels of every mixer of a model."""
    return {n: covered(case, c.total, c.mask.shape[1]) for n, c in every_head(model).items()}


def stir_all(model: torch.nn.Module) -> None:
    """Train all gates of a wrapped model, so to speak."""
    for module in model.modules():
        if isinstance(module, Gate):
            stir(module)
