"""Settings of every chosen head, one after the other: a value is taken where answers surely gain by it.

Segments that a token reads, sharpness, and what a segment starts from (MATH 16: which init helps is a
property of the head, to be measured).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mcretrofit.choices import Choice
from mcretrofit.config import CachingConfig
from mcretrofit.planted import Losses
from mcretrofit.rules import Z_TEMPERATURE

TRIED = {
    "top_k": (1, 2, 4),
    "temperature": (Z_TEMPERATURE / 2, Z_TEMPERATURE, 2 * Z_TEMPERATURE),
    "init": ("carry_delta", "reset"),
}
Trial = Callable[[Sequence[Choice]], Losses]


class Tried(NamedTuple):
    """One value of one head's setting beside those chosen so far; changes against the base."""

    mixer: str
    head: int
    setting: str
    value: object
    answers: float  # nats a token
    prose: float  # relative
    taken: bool


def refined(
    config: CachingConfig,
    choices: Sequence[Choice],
    trial: Trial,
    base: Losses,
    worse: float,
    worth: float = 0.0,
) -> tuple[list[Choice], list[Tried]]:
    """The heads with the settings of best answers that leave prose within `worse`, and all tried.

    A value replaces another where the 95 % interval of what each answer gains lies above zero, and
    the gain is `worth` nats a token at least.
    """
    chosen, best, table = list(choices), trial(choices), []
    for at, choice in enumerate(choices):
        for name, values in _open(config):
            first = taken = _usual(config, name)
            found = {first: best}
            for value in values:
                if value == first:
                    continue
                other = [*chosen]
                other[at] = chosen[at].having(name, value)
                found[value] = done = trial(other)
                if _gains(best, done, worth) and done.prose <= base.prose * (1 + worse):
                    best, taken = done, value
            if taken != first:
                chosen[at] = chosen[at].having(name, taken)
            table += [
                Tried(*choice[:2], name, value, *_change(done, base), value == taken)
                for value, done in sorted(found.items(), key=lambda one: values.index(one[0]))
            ]
    return chosen, table


def _open(config: CachingConfig) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Names and values of the settings that count under a configuration, its own value among them."""
    for name, values in TRIED.items():
        if name != "top_k" or config.preset.aggregator == "ssc":
            own = _usual(config, name)
            yield name, values if own in values else (own, *values)


def _usual(config: CachingConfig, name: str) -> Any:
    value = getattr(config, name)
    return Z_TEMPERATURE if name == "temperature" and value is None else value


def _change(done: Losses, base: Losses) -> tuple[float, float]:
    return (done.answers.mean() - base.answers.mean()).item(), done.prose / base.prose - 1


def _gains(before: Losses, after: Losses, worth: float) -> bool:
    gains = before.answers - after.answers
    spread = gains.std() / len(gains) ** 0.5 if len(gains) > 1 else math.inf
    return gains.mean().item() > max(worth, 1.96 * float(spread))
