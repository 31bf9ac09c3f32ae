"""Controls of a retrofit on the same samples: is it the routing that helps?

`random`: a token's logits change places at random among the segments that it sees (mixing strength
kept, routing destroyed); `recent`: the largest logits go to the most recent segments; `none`: no
cached segment is read and covered heads start every segment empty; `oracle`: from a question's first
token on, the segment that holds its answer takes all weight, other tokens read the online memory.
Choices hang on a row's text and places alone: padding, pieces and batches change nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mcretrofit.aggregators import Reading, Weights
from mcretrofit.config import CachingConfig
from mcretrofit.evaluate import Outcome, run
from mcretrofit.questions import targets
from mcretrofit.retrofit import plans
from mcretrofit.routers import Opened
from mcretrofit.segments import Bank
from mcretrofit.tasks import Sample
from mcretrofit.tokenizer import Tokenizer

NAMES = ("random", "recent", "none", "oracle")
NEVER = 1 << 62
ENTRIES = 1 << 22  # logits that are moved at a time

Weigh = Callable[[Reading], Weights]


class Row(NamedTuple):
    """One row of a batch: what its random choices hang on, and (place, segment) of its questions."""

    key: int
    steps: tuple[tuple[int, int], ...] = ()


def row(sample: Sample, tokenizer: Tokenizer, segment: int, name: str, seed: int = 0) -> Row:
    """The row of a sample; for `oracle` it must have `targets`."""
    key = zlib.crc32(f"{seed}/{sample.prompt}".encode())
    steps = targets(sample, tokenizer, segment) if name == "oracle" else ()
    return Row(key, tuple(steps or ()))


@contextmanager
def controlled(model: nn.Module, name: str) -> Iterator[Callable[[list[Row]], None]]:
    """The wrapped model under a control; the function that it yields is told each batch's rows."""
    found, rows = plans(model), [Row(0)]
    before = {mixer: (p.config, p.logarithmic, p.each) for mixer, p in found.items()}

    def begin(batch: list[Row]) -> None:
        rows[:] = batch

    try:
        for number, plan in enumerate(found.values()):
            plan.reroute = partial(_WAYS[name], number, rows)
            if name == "none":
                plan.config, plan.logarithmic = plan.config.replace(init="reset"), False
                plan.each = {**(plan.each or {}), "init": ["reset"] * len(plan.inits)}
        yield begin
    finally:
        for mixer, plan in found.items():
            plan.reroute = None
            plan.config, plan.logarithmic, plan.each = before[mixer]


def outcomes(
    model: nn.Module,
    tokenizer: Tokenizer,
    config: CachingConfig,
    task: str,
    samples: list[Sample],
    done: Outcome,
    tick: Callable[[int], None] = lambda _: None,
    known: dict[str, Outcome] | None = None,
) -> dict[str, Outcome | None]:
    """Every control of a wrapped model, None where there is none; `done` is the retrofit's own.

    `known` holds those that a setting with the same `shared` gave, and is filled.
    """
    found: dict[str, Outcome | None] = {}
    longest = max(sample.tokens for sample in samples)
    for name in NAMES:
        if not applies(name, config, samples, tokenizer):
            found[name] = None
        elif longest <= config.segment * (2 if name in ("random", "recent") else 1):
            # at most one segment is ever seen (or none): nothing to choose
            found[name] = done
        elif name in (known or {}):
            found[name] = known[name]
        else:
            with controlled(model, name) as begin:
                rows = partial(_rows, tokenizer, config.segment, name)
                found[name] = run(
                    model, tokenizer, task, samples, tick, lambda some, b=begin, r=rows: b(r(some))
                )
            if known is not None and name in ("none", "oracle"):
                known[name] = found[name]
            continue
        tick(len(samples))
    return found


def shared(config: CachingConfig) -> CachingConfig:
    """What `none` and `oracle` hang on: neither scores nor how reads are mixed."""
    default, variant = CachingConfig(), config.variant
    kept = variant if config.preset.segmentation == "logarithmic" else "grm"
    idle = ("top_k", "rule", "margin", "relative", "temperature")
    return config.replace(variant=kept, **{name: getattr(default, name) for name in idle})


def applies(name: str, config: CachingConfig, samples: list[Sample], tokenizer: Tokenizer) -> bool:
    """Whether a control says anything: what takes all segments alike has no routing to destroy."""
    if name in ("random", "recent"):
        return config.routed
    if name == "oracle":
        return all(targets(sample, tokenizer, config.segment) for sample in samples)
    return True


def _rows(tokenizer: Tokenizer, segment: int, name: str, samples: list[Sample]) -> list[Row]:
    return [row(sample, tokenizer, segment, name) for sample in samples]


def _none(
    mixer: int, rows: list[Row], weigh: Weigh, reading: Reading, bank: Bank, opened: Opened
) -> Weights:
    return weigh(reading._replace(visible=torch.zeros_like(reading.visible)))


def _recent(
    mixer: int, rows: list[Row], weigh: Weigh, reading: Reading, bank: Bank, opened: Opened
) -> Weights:
    def scores() -> tuple[Tensor, Tensor]:
        cached, online = reading.scores()
        number = bank.number[:, None].expand_as(bank.visible)
        newest = number.masked_fill(~bank.visible, -1).argsort(-1, descending=True)
        ranked = cached.masked_fill(~bank.visible[:, :, None], -torch.inf)
        ranked = ranked.sort(-1, descending=True).values
        return torch.empty_like(ranked).scatter(-1, _heads(newest, ranked), ranked), online

    return weigh(reading._replace(scores=scores))


def _random(
    mixer: int, rows: list[Row], weigh: Weigh, reading: Reading, bank: Bank, opened: Opened
) -> Weights:
    def scores() -> tuple[Tensor, Tensor]:
        cached, online = reading.scores()
        step = max(1, ENTRIES // (cached.numel() // cached.shape[1]))
        keys = torch.tensor([one.key for one in rows], device=cached.device)
        number = bank.number.expand(len(keys), -1)
        parts = [
            _shuffled(some, seen, _noise(mixer, keys, place, number, cached.shape[2]))
            for some, seen, place in zip(
                cached.split(step, 1),
                bank.visible.split(step, 1),
                opened.places.split(step, 1),
                strict=True,
            )
        ]
        return torch.cat(parts, 1), online

    return weigh(reading._replace(scores=scores))


def _shuffled(cached: Tensor, visible: Tensor, noise: Tensor) -> Tensor:
    """Logits `[B, T, H, N]` of visible segments in the order of their noise."""
    hidden = ~visible[:, :, None]
    taken = cached.masked_fill(hidden, -torch.inf)
    taken = taken.gather(-1, noise.masked_fill(hidden, NEVER).argsort(-1))
    slots = (~visible).long().argsort(dim=-1, stable=True)
    return torch.empty_like(taken).scatter(-1, _heads(slots, taken), taken)


def _noise(mixer: int, keys: Tensor, places: Tensor, number: Tensor, heads: int) -> Tensor:
    """Numbers below `NEVER` for `[B, T, H, N]` by hashing the coordinates (SplitMix64's finish)."""
    head = torch.arange(heads, device=keys.device) + 1000 * mixer
    x = keys[:, None] * 0x9E3779B1 + places * 0x85EBCA77
    x = _stirred(x)[:, :, None] + head * 0xC2B2AE3D
    return _stirred(x[..., None] + number[:, None, None] * 0x27D4EB2F) & (NEVER - 1)


def _stirred(x: Tensor) -> Tensor:
    # constants as signed 64-bit numbers: products wrap around
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return x ^ (x >> 31)


def _oracle(
    mixer: int, rows: list[Row], weigh: Weigh, reading: Reading, bank: Bank, opened: Opened
) -> Weights:
    wanted = _wanted(rows, opened.places)[..., None]
    # a merged block holds the segments up to its number that no earlier block does
    holds = bank.visible & (bank.number[:, None] >= wanted) & (wanted >= 0)
    nearest = bank.number[:, None].expand_as(holds).masked_fill(~holds, NEVER).min(-1)
    found = (nearest.values < NEVER)[..., None].expand(-1, -1, reading.heads)
    weight = found.to(bank.summaries.dtype)
    slots = nearest.indices[..., None].expand(-1, -1, reading.heads)
    return Weights(1 - weight, weight[..., None], slots[..., None])


def _wanted(rows: list[Row], places: Tensor) -> Tensor:
    """The segment that each token should read `[B, T]`, -1 before the first question."""
    most = max(len(one.steps) for one in rows)
    starts = torch.full((len(rows), most), NEVER, device=places.device)
    held = torch.full((len(rows), most + 1), -1, device=places.device)
    for i, one in enumerate(rows):
        for j, (start, segment) in enumerate(one.steps):
            starts[i, j], held[i, j + 1] = start, segment
    passed = (places[:, :, None] >= starts[:, None]).sum(-1)
    return held.gather(1, passed)


def _heads(index: Tensor, like: Tensor) -> Tensor:
    return index[:, :, None].expand_as(like)


_WAYS = {"random": _random, "recent": _recent, "none": _none, "oracle": _oracle}
