"""Does a score find the segment that holds a fact, and how loud is it on prose?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mcretrofit.config import CachingConfig
from mcretrofit.errors import RetrofitError
from mcretrofit.planted import Planted
from mcretrofit.retrofit import Cover, plans, retrofitted
from mcretrofit.surprise import Scores

Key = tuple[str, int]  # a mixer's name and a head of it


class Found(NamedTuple):
    """Does one head's score find facts?"""

    hit: float  # share of answer tokens that score their fact's segment highest
    chance: float


class Seen(NamedTuple):
    """How one head's score of one kind behaves."""

    hit: float
    chance: float
    loudest: Tensor  # the best score of each prose token


def watched(
    model: nn.Module,
    config: CachingConfig,
    covers: Mapping[str, Cover],
    facts: list[Planted],
    prose: Tensor,
) -> dict[Key, Seen]:
    """What every covered head's scores do on facts and prose, the model reading as without MC."""
    seen = found(model, config, covers, facts)
    with retrofitted(model, _silent(config), covers):
        plain_text = {name: Scores() for name in plans(model)}
        for name, plan in plans(model).items():
            plan.watch = plain_text[name].add
        with torch.no_grad():
            for row in prose.to(model.device):
                model(input_ids=row[None], use_cache=False, logits_to_keep=1)
    return {
        (name, head): Seen(*seen[name, head], plain_text[name].loudest()[:, i])
        for name, cover in covers.items()
        for i, head in enumerate(cover.heads)
    }


def found(
    model: nn.Module, config: CachingConfig, covers: Mapping[str, Cover], facts: list[Planted]
) -> dict[Key, Found]:
    """How often every covered head's score is highest for a fact's segment where its answer is due.

    Raises `RetrofitError` where no fact lies in a closed segment.
    """
    rows: dict[str, list[tuple[Planted, Tensor, Tensor]]] = {}
    with retrofitted(model, _silent(config), covers):
        for one in facts:
            heard: dict[str, list[tuple[Tensor, Tensor]]] = {}
            for name, plan in plans(model).items():
                plan.watch = _into(heard.setdefault(name, []))
            with torch.no_grad():
                ids = torch.tensor([one.ids], device=model.device)
                model(input_ids=ids, use_cache=False, logits_to_keep=1)
            for name, parts in heard.items():
                rows.setdefault(name, []).append((one, *_joined(parts)))
    return {
        (name, head): _found(rows[name], i, config.segment)
        for name, cover in covers.items()
        for i, head in enumerate(cover.heads)
    }


def _silent(config: CachingConfig) -> CachingConfig:
    """Scores are heard while gates without statistics leave the online read as it is."""
    return config.replace(variant="grm", init="carry_delta", gate=False)


def _into(parts: list[tuple[Tensor, Tensor]]) -> Callable[[Tensor, Tensor], None]:
    def add(scores: Tensor, visible: Tensor) -> None:
        parts.append((scores[0].cpu(), visible[0].cpu()))

    return add


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Scores `[T, H, N]` and visible `[T, N]` of the last T tokens (the first see no segment)."""
    most = max(scores.shape[-1] for scores, _ in parts)
    pad = torch.nn.functional.pad
    return (
        torch.cat([pad(s, (0, most - s.shape[-1])) for s, _ in parts]),
        torch.cat([pad(v, (0, most - v.shape[-1])) for _, v in parts]),
    )


def _found(rows: list[tuple[Planted, Tensor, Tensor]], head: int, segment: int) -> Found:
    hits, chances = [], []
    for one, scores, visible in rows:
        own = scores[:, head].masked_fill(~visible, -torch.inf)
        # heard in whole segments, from the first ones on that see a closed one
        first = -(-len(one.ids) // segment) * segment - len(scores)
        for at, found in _asked(one, own, first, segment):
            hits.append(float(at.argmax() == found))
            chances.append(1 / int((at > -torch.inf).sum()))
    if not hits:
        raise RetrofitError("no planted fact lies in a closed segment; give a longer --length")
    return Found(sum(hits) / len(hits), sum(chances) / len(chances))


def _asked(one: Planted, own: Tensor, first: int, segment: int) -> Iterator[tuple[Tensor, int]]:
    """The scores `[N]` of every token that predicts an answer, and the segment of its fact."""
    for (start, stop), (_, end) in zip(one.answers, one.facts, strict=True):
        found = (end - 1) // segment
        for t in range(start - 1, stop - 1):
            if found < t // segment and t >= first:
                yield own[t - first], found
