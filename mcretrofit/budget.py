"""What a choice of heads may cost at a length: bytes of cached segments, milliseconds of a step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from mcretrofit.config import CachingConfig
from mcretrofit.evaluate import read_pieces, segment_bytes
from mcretrofit.retrofit import Cover, retrofitted

STEPS = 9


class Spent(NamedTuple):
    """What caching holds and adds after a prompt."""

    megabytes: float
    milliseconds: float  # a decoding step more than without caching


class Budget(NamedTuple):
    """The most that caching may hold (MB) and add to a decoding step (ms); None is no limit."""

    megabytes: float | None = None
    milliseconds: float | None = None

    @property
    def bounded(self) -> bool:
        return any(most is not None for most in self)

    def holds(self, spent: Spent) -> bool:
        """Whether both limits are kept."""
        pairs = zip(spent, self, strict=True)
        return all(most is None or found <= most for found, most in pairs)


NO_LIMIT = Budget()


def spent(
    model: nn.Module, config: CachingConfig, covers: Mapping[str, Cover], ids: list[int]
) -> Spent:
    """Measured on the bare model's prompt `ids`, with caching and without it."""
    before, _ = _step(model, ids)
    with retrofitted(model, config, dict(covers)):
        after, held = _step(model, ids)
    return Spent(held / 1e6, max(0.0, 1e3 * (after - before)))


@torch.no_grad()
def _step(model: nn.Module, ids: list[int]) -> tuple[float, int]:
    """Median seconds of a decoding step behind a prompt, and the bytes of its cached segments."""
    *_, (_, _, cache) = read_pieces(model, torch.tensor([ids], device=model.device), None, keep=1)
    # of the prompt alone: the steps may close one more
    held = segment_bytes(cache)
    token = torch.tensor([ids[-1:]], device=model.device)
    seconds = []
    for _ in range(STEPS):
        began = time.monotonic()
        out = model(input_ids=token, use_cache=True, past_key_values=cache)
        cache = out.past_key_values
        out.logits.sum().item()
        seconds.append(time.monotonic() - began)
    return median(seconds), held
