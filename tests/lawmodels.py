"""What the laws of retrofitted models share: a tiny model a family, wrapped for a while."""

from __future__ import annotations

import pytest
import torch
from lawkit import Case, build, cases, covers, stir_all
from torch import Tensor, nn

from mcretrofit import registry
from mcretrofit.retrofit import mixers, retrofit_, revert_
from mcretrofit.segments import SegmentCache

_built: dict[str, nn.Module] = {}


def bare(family: str) -> nn.Module:
    """One tiny model a family for all laws, as every one of them leaves it."""
    if family not in _built:
        _built[family] = build(family, num_hidden_layers=1)
    return _built[family]


NAMES = registry.names("models")
FAMILY = pytest.mark.parametrize("family", NAMES)


def some(family: str, count: int, seed: int, **fixed: object) -> list[Case]:
    memory = mixers(bare(family))[0].op.MEMORY.__name__.rsplit(".", 1)[1]
    return cases(count, seed + 10 * NAMES.index(family), memory=memory, **fixed)


class caching:
    """A family's model under a case, gates trained; the bare model again afterwards."""

    def __init__(self, family: str, case: Case, **changes: object) -> None:
        self.model, self.case = bare(family), case
        retrofit_(self.model, case.config.replace(**changes), covers(self.model, case))
        stir_all(self.model)

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(self, *_: object) -> None:
        revert_(self.model)


def pieces(model: nn.Module, ids: Tensor, sizes: list[int], cache=None) -> tuple[Tensor, object]:
    logits = []
    for part in ids.split(sizes, 1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1), cache


def segments(cache) -> SegmentCache:
    return cache.states[0]["segments"]
