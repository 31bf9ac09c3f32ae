"""Settings of a whole model, one after the other: a value is taken where answers surely gain by it.

Segments that a token reads, sharpness, and what a segment starts from (MATH 16: which init helps is a
property of the heads, to be measured).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from mcretrofit.config import CachingConfig
from mcretrofit.planted import Losses
from mcretrofit.rules import Z_TEMPERATURE

TRIED = {
    "top_k": (1, 2, 4),
    "temperature": (Z_TEMPERATURE / 2, Z_TEMPERATURE, 2 * Z_TEMPERATURE),
    "init": ("carry_delta", "reset"),
}


class Tried(NamedTuple):
    """One value of one setting beside those chosen so far; changes against the base."""

    setting: str
    value: object
    answers: float  # nats a token
    prose: float  # relative
    taken: bool


def refined(
    config: CachingConfig,
    trial: Callable[[CachingConfig], Losses],
    base: Losses,
    worse: float,
    worth: float = 0.0,
) -> tuple[CachingConfig, list[Tried]]:
    """The setting with the best answers among those that leave prose within `worse`, and all tried.

    A value replaces another where the 95 % interval of what each answer gains lies above zero, and
    the gain is `worth` nats a token at least.
    """
    best, table = trial(config), []
    for name, values in TRIED.items():
        if name == "top_k" and config.preset.aggregator != "ssc":
            continue
        found = [(value, trial(config.replace(**{name: value}))) for value in values]
        taken = getattr(config, name)
        for value, done in found:
            if _gains(best, done, worth) and done.prose <= base.prose * (1 + worse):
                best, taken = done, value
        config = config.replace(**{name: taken})
        table += [
            Tried(
                name,
                value,
                (done.answers.mean() - base.answers.mean()).item(),
                done.prose / base.prose - 1,
                value == taken,
            )
            for value, done in found
        ]
    return config, table


def _gains(before: Losses, after: Losses, worth: float) -> bool:
    gains = before.answers - after.answers
    spread = gains.std() / len(gains) ** 0.5 if len(gains) > 1 else math.inf
    return gains.mean().item() > max(worth, 1.96 * float(spread))
