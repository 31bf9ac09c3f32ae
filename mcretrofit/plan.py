"""One mixer's caching plan: its configuration, its gate, and the modules that the names mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mcretrofit.aggregators import Weights
from mcretrofit.config import CachingConfig
from mcretrofit.dyadic import DyadicCache
from mcretrofit.errors import RetrofitError
from mcretrofit.gates import Gate
from mcretrofit.memories import Streams
from mcretrofit.memories._networks import Layer
from mcretrofit.memories._scan import State, tree
from mcretrofit.registry import load
from mcretrofit.routers import NEAR
from mcretrofit.routers._byhead import by_head
from mcretrofit.segments import SegmentCache


class Plan:
    """One mixer's caching: its configuration, its gate, and the modules that the names mean."""

    def __init__(
        self,
        config: CachingConfig,
        gate: Gate,
        memory: ModuleType,
        heads: int,
        each: Mapping[str, list] | None = None,
    ) -> None:
        self.config, self.gate, self.memory, self.total = config, gate, memory, heads
        # by cached head; None where all are the configuration's
        self.each = dict(each) if each else None
        self.router = by_head(self.by_head("router"), config.directions or gate.mask.shape[1])
        self.aggregator = load("aggregators", config.preset.aggregator)
        counts = self.by_head("top_k")
        most = counts[0] if len(set(counts)) == 1 else counts
        self.options = {"top_k": most} if config.preset.aggregator == "ssc" else {}
        self.logarithmic = config.preset.segmentation == "logarithmic"
        # calibration looks at the scores and at what is visible through this
        self.watch: Callable[[Tensor, Tensor], None] | None = None
        # controls weigh segments in their own way through this: (weigh, reading, bank, opened)
        self.reroute: Callable[..., Weights] | None = None
        # a network's reads are not linear in its state or in the query
        self.network = hasattr(memory, "read")
        self.kind = memory.__name__.rsplit(".", 1)[1]
        merging = {"carry"} if self.network else {"carry", "carry_delta"}
        apart = set(self.inits) - merging
        if self.logarithmic and apart and not memory.MERGES:
            raise RetrofitError(
                f"loglinear with init {min(apart)} has no way to merge the states of a {self.kind} "
                f"memory; take --init {' or '.join(sorted(merging, reverse=True))}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        """A copied model's own: modules are shared, the gate is the copy."""
        made = memo[id(self)] = copy(self)
        made.gate = deepcopy(self.gate, memo)
        return made

    def by_head(self, name: str) -> list:
        """A setting of every cached head; of one where none is cached."""
        usual = [getattr(self.config, name)] * max(1, len(self.gate.heads))
        return (self.each or {}).get(name, usual)

    def check(self, heads: int, keys: int) -> None:
        """Refuse a mixer of other heads than those that were chosen from."""
        mine = self.total, self.gate.mask.shape[1]
        if mine != (heads, keys):
            raise RetrofitError(
                f"heads were chosen from {mine[0]} of {mine[1]} channels, and this model has {heads} "
                f"of {keys}; wrap it again"
            )

    @property
    def inits(self) -> list[str]:
        """What the segments of every cached head begin with."""
        return self.by_head("init")

    def begins(self, init: str, axes: int = 0) -> bool | Tensor:
        """Whether cached heads have an init: of all, or `[H', 1, ...]` with some axes of size one."""
        found = [one == init for one in self.inits]
        if len(set(found)) == 1:
            return found[0]
        return torch.tensor(found, device=self.gate.mask.device).view(-1, *[1] * axes)

    @property
    def afresh(self) -> list[int]:
        """Places of the cached heads whose segments are also written from an empty start: under
        `reset`, and under `carry_delta` of networks, which cannot be subtracted."""
        alone = {"reset", "carry_delta"} if self.network else {"reset"}
        return [h for h, init in enumerate(self.inits) if init in alone]

    def alone(self, x: Tensor) -> Tensor:
        """Of the cached heads of `x [B, H', ...]` those of `afresh`."""
        return x if len(self.afresh) == len(self.inits) else x[:, self.afresh]

    def heat(self, usual: float) -> float | Tensor:
        """The temperature, `usual` where none is set; of each head `[H']` where they differ."""
        given = [usual if one is None else one for one in self.by_head("temperature")]
        if len(set(given)) == 1:
            return self.gate.heated(given[0])
        return self.gate.heated(torch.tensor(given, device=self.gate.mask.device))

    @cached_property
    def all_heads(self) -> bool:
        return self.gate.heads == list(range(self.total))

    @cached_property
    def partial(self) -> bool:
        """Whether some channels of a cached head are left alone."""
        some = bool((self.gate.mask == 0).any())
        if some and self.network:
            raise RetrofitError(
                f"some channels of a head cannot be cached of a {self.kind} memory: a network is "
                "read whole"
            )
        return some

    @property
    def blends(self) -> bool:
        """Whether the weights of networks are mixed (soup); of matrices the reads are as good."""
        return self.network and self.aggregator.MIXES == "states"

    @property
    def differs(self) -> bool:
        """Whether a state's difference to that before its segment is cached, of any head."""
        return "carry_delta" in self.inits and not self.network

    @property
    def own(self) -> bool:
        """Whether what the open segment wrote itself is weighed apart from the past that it carries."""
        config = self.config
        constant = not self.logarithmic and "carry_delta" in self.inits and not self.blends
        scored = config.routed and config.rule == "z" and hasattr(self.router, "settled")
        return config.own and constant and scored

    @property
    def near(self) -> int:
        """How many tokens before each stand too near to be called the open segment's memory."""
        return min(NEAR, self.config.segment // 4)

    @property
    def directions(self) -> int:
        """How many directions questions and keys are turned to; 0 for questions alone, and all."""
        turned = self.gate.mask.shape[1] if getattr(self.router, "WHITENS", False) else 0
        return (self.config.directions or turned) if self.router.UNIT else 0

    @cached_property
    def sums(self) -> bool:
        """Whether scores of any cached head add up over the tokens of a segment."""
        return bool(torch.tensor(getattr(self.router, "ADDS", True)).any())

    def adds(self, device: torch.device) -> Tensor:
        """Whose scores add up over the tokens of a segment: of each cached head, or of all."""
        return torch.tensor(getattr(self.router, "ADDS", True), device=device)

    def part(self, places: Tensor) -> Tensor | None:
        """Which part of its segment holds each token of `places [B, T]`, for a router that asks."""
        segment = self.config.segment
        count = (
            segment if getattr(self.router, "PLACES", False) else getattr(self.router, "PARTS", 0)
        )
        return places % segment * count // segment if count else None

    def merge(self, before: Tensor, after: Tensor) -> Tensor:
        """The summary of two pieces, one behind the other."""
        return getattr(self.router, "merge", torch.add)(before, after)

    def start(self, batch: int, device: torch.device) -> SegmentCache:
        """An empty cache of this plan's kind."""
        return (DyadicCache if self.logarithmic else SegmentCache).start(batch, device)

    def cached(self, x: Tensor) -> Tensor:
        """The cached heads of `x [B, T, H, ...]`."""
        return x if self.all_heads else x[:, :, self.gate.heads]

    def held(self, state: State) -> State:
        """The cached heads of a state `[B, H, ...]`."""
        return state if self.all_heads else tree(lambda s: s[:, self.gate.heads], state)

    def among(self, layer: Layer) -> Layer:
        """A layer of all heads as one of the cached heads."""
        if self.all_heads:
            return layer

        def read(i: int, x: Tensor) -> Tensor:
            wide = x.new_zeros(*x.shape[:2], self.total, x.shape[-1])
            wide[:, :, self.gate.heads] = x
            return self.cached(layer(i, wide))

        return read

    def pick(self, streams: Streams, masked: bool) -> Streams:
        """The cached heads of all streams, their queries masked to the cached channels if asked."""
        picked = streams if self.all_heads else streams.heads(self.gate.heads)
        return picked._replace(q=self.gate.masked(picked.q)) if masked else picked
