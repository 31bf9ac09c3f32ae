"""What a search chose for each head, and the covers that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcretrofit.config import CachingConfig
from mcretrofit.each import differing
from mcretrofit.registry import load
from mcretrofit.retrofit import Cover
from mcretrofit.rules import Z_TEMPERATURE


class Kind(NamedTuple):
    """A way to score segments: a router, and whether questions are whitened."""

    name: str
    router: str
    whiten: bool


def kinds(config: CachingConfig) -> list[Kind]:
    """What each head is tried with: the configured router, and those that stand beside it."""
    own, made = load("routers", config.router), [Kind("raw", config.router, False)]
    if own.UNIT:
        made.append(Kind("whitened", config.router, True))
    for name in getattr(own, "BESIDE", ()):
        made.append(Kind(name, name, load("routers", name).UNIT))
    return made


class Choice(NamedTuple):
    """What was found for one head; losses are changes against the base, in nats a token."""

    mixer: str
    head: int
    hits: dict[str, float]  # by the kind's name
    used: bool
    why: str
    kind: Kind | None = None
    opens: float | None = None  # share of prose tokens
    threshold: float | None = None
    answers: float | None = None
    prose: float | None = None  # relative
    settings: Mapping[str, Any] = {}  # its own, where they are not the configuration's

    def having(self, name: str, value: object) -> Choice:
        """With another value of a setting."""
        return self._replace(settings={**self.settings, name: value})


def told(choice: Choice) -> str:
    """How a head is opened, in words."""
    own = (f"{name} {value}" for name, value in choice.settings.items())
    return ", ".join([choice.kind.name, f"open for {choice.opens:.1%} of prose", *own])


def turned(choices: Sequence[Choice]) -> bool:
    """Whether any head asks with a whitened question."""
    return any(choice.kind.whiten for choice in choices)


def covers(
    choices: Sequence[Choice],
    made: Mapping[Kind, Mapping[str, Cover]],
    config: CachingConfig,
) -> dict[str, Cover]:
    """Thresholds become the mean and spread that the z rule reads; other heads are left out.

    `made` are the covers of all heads by the kind of score that they were measured with.
    """
    mixers = next(iter(made.values()))
    return {
        name: _cover(
            sorted((c for c in choices if c.mixer == name), key=lambda c: c.head),
            {kind: covers[name] for kind, covers in made.items()},
            config,
            turned(choices) or config.directions > 0,
        )
        for name in mixers
    }


def _cover(
    choices: Sequence[Choice], made: Mapping[Kind, Cover], config: CachingConfig, white: bool
) -> Cover:
    every = next(iter(made.values()))
    at = [every.heads.index(c.head) for c in choices]
    placed = [(c, made[c.kind], i) for c, i in zip(choices, at, strict=True)]
    spreads = [_spread(c, own, i, config) for c, own, i in placed]
    means = [c.threshold - config.margin * s for c, s in zip(choices, spreads, strict=True)]
    matrices = [_matrix(own, i) for _, own, i in placed]
    own = [{"router": c.kind.router, **c.settings} for c in choices]
    return Cover(
        [c.head for c in choices],
        every.total,
        every.mask[at],
        torch.tensor(means),
        torch.tensor(spreads),
        torch.stack(matrices) if white and matrices else None,
        differing(config, own),
    )


def _spread(choice: Choice, own: Cover, at: int, config: CachingConfig) -> float:
    scale = max((choice.threshold - own.mean[at].item()) / 2, 1e-6)
    return scale * (config.temperature or Z_TEMPERATURE) / Z_TEMPERATURE


def _matrix(own: Cover, at: int) -> Tensor:
    return torch.eye(own.mask.shape[1]) if own.whiten is None else own.whiten[at]
