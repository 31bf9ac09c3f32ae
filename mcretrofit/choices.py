"""What a search chose for each head, and the covers that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mcretrofit.config import CachingConfig
from mcretrofit.retrofit import Cover
from mcretrofit.rules import Z_TEMPERATURE

KINDS = ("raw", "whitened")


class Choice(NamedTuple):
    """What was found for one head; losses are changes against the base, in nats a token."""

    mixer: str
    head: int
    hits: tuple[float, ...]  # by KINDS
    used: bool
    why: str
    kind: str | None = None
    opens: float | None = None  # share of prose tokens
    threshold: float | None = None
    answers: float | None = None
    prose: float | None = None  # relative


def turned(choices: Sequence[Choice]) -> bool:
    """Whether any head asks with a whitened question."""
    return any(choice.kind == "whitened" for choice in choices)


def covers(
    choices: Sequence[Choice],
    raw: Mapping[str, Cover],
    white: Mapping[str, Cover],
    config: CachingConfig,
) -> dict[str, Cover]:
    """Thresholds become the mean and spread that the z rule reads; other heads are left out."""
    return {
        name: _cover(
            sorted((c for c in choices if c.mixer == name), key=lambda c: c.head),
            (raw[name], white[name]),
            config,
            turned(choices) or config.directions > 0,
        )
        for name in raw
    }


def _cover(
    choices: Sequence[Choice], both: tuple[Cover, Cover], config: CachingConfig, white: bool
) -> Cover:
    raw, at = both[0], [both[0].heads.index(c.head) for c in choices]
    placed = list(zip(choices, at, strict=True))
    spreads = [_spread(c, both[KINDS.index(c.kind)], i, config) for c, i in placed]
    means = [c.threshold - config.margin * s for c, s in zip(choices, spreads, strict=True)]
    matrices = [_matrix(both[KINDS.index(c.kind)], i) for c, i in placed]
    return Cover(
        [c.head for c in choices],
        raw.total,
        raw.mask[at],
        torch.tensor(means),
        torch.tensor(spreads),
        torch.stack(matrices) if white and matrices else None,
    )


def _spread(choice: Choice, own: Cover, at: int, config: CachingConfig) -> float:
    scale = max((choice.threshold - own.mean[at].item()) / 2, 1e-6)
    return scale * (config.temperature or Z_TEMPERATURE) / Z_TEMPERATURE


def _matrix(own: Cover, at: int) -> Tensor:
    return torch.eye(own.mask.shape[1]) if own.whiten is None else own.whiten[at]
