"""How a prompt meets its length: the largest haystack that fits, and the checks of a request."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from mcretrofit.errors import UsageError
from mcretrofit.tokenizer import Tokenizer


def largest(cost: Callable[[int], int], budget: int, smallest: int) -> int:
    """The largest size >= `smallest` that costs at most `budget`; `smallest` must fit.

    Costs grow almost linearly, so most probes interpolate; every third one halves the bracket.
    """
    low, low_cost = first, first_cost = smallest, cost(smallest)
    high, high_cost = _next(low), cost(_next(low))
    while high_cost <= budget:
        low, low_cost = high, high_cost
        # a little beyond where the line meets the budget; at most sixteenfold, at least by one
        each = max(low_cost - first_cost, 1) / (low - first)
        high = min(low + 1 + int(1.05 * (budget - low_cost) / each), _next(low))
        if high > 64 * (budget + 1):
            raise UsageError(f"no haystack costs {budget} tokens: the tokenizer drops its text")
        high_cost = cost(high)
    turn = 0
    while high - low > 1:
        turn += 1
        guess = low + (budget - low_cost) * (high - low) // (high_cost - low_cost)
        probe = (low + high) // 2 if turn % 3 == 0 else min(max(guess, low + 1), high - 1)
        probe_cost = cost(probe)
        if probe_cost <= budget:
            low, low_cost = probe, probe_cost
        else:
            high, high_cost = probe, probe_cost
    return low


def _next(size: int) -> int:
    return 16 * (size + 1)


def stream(task: str, seed: int, index: int) -> Random:
    """The random stream of one sample; seeded by text, so no process-wide hash enters."""
    return Random(f"{task}/{seed}/{index}")


def check_request(task: str, *, length: int, depth: float | None, count: int) -> None:
    """Refuse numbers that mean nothing, before any work is done."""
    if length < 1 or count < 1:
        raise UsageError(f"{task}: length ({length}) and count ({count}) must be at least 1")
    if depth is not None and not 0 <= depth <= 100:
        raise UsageError(f"{task}: depth is in percent, 0 to 100, not {depth}")


def no_depth(task: str, depth: float | None) -> None:
    """Refuse a depth where the task has no single needle to place."""
    if depth is not None:
        raise UsageError(f"{task} has no single needle to place: leave the depth out")


def check_room(task: str, smallest: int, length: int) -> None:
    """Refuse a length below the smallest one that works, which the error names."""
    if smallest > length:
        raise UsageError(
            f"{task}: a length of {length} tokens is too short for the needle and its template; "
            f"the smallest length that works is {smallest}"
        )


def check_spelling(task: str, tokenizer: Tokenizer, text: str) -> None:
    """Refuse a tokenizer that cannot spell what it will be asked for."""
    back = tokenizer.decode(tokenizer.encode(text))
    if back.strip() != text.strip():
        raise UsageError(
            f"{task}: the tokenizer {tokenizer.name} cannot spell {text!r} (it reads back {back!r})"
        )
