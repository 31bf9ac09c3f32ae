"""Second moment of a segment's keys in half of their dimensions: routing at a quarter of the cost.

Beyond the paper (MATH 16 a). Queries and keys are turned once by a fixed orthonormal matrix and only
`K / 2` of their coordinates are kept: a match keeps its weight on average, ordinary keys are spread
over fewer directions, so that twice as few of them fit a segment before it drowns a match.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mcretrofit.routers import Asked, Opened, _moment
from mcretrofit.segments import Bank

UNIT, USES_QUERY, POSITIVE, TEMPERATURE = True, True, True, 10.0
SEED = 0


def kept(keys: int) -> int:
    """Dimensions that are looked at."""
    return max(1, keys // 2)


def width(keys: int) -> int:
    """Floats a segment and head."""
    return _moment.width(kept(keys))


def summarise(keys: Tensor, valid: Tensor) -> Tensor:
    """`[B, S, C, H, K]` -> `[B, S, H, P]`."""
    return _moment.summarise(_projected(keys), valid)


def score(asked: Asked, bank: Bank, opened: Opened | None) -> tuple[Tensor, Tensor | None]:
    """The moment's score of what is left of queries and keys."""
    return _moment.score(asked._replace(u=_projected(asked.u)), bank, _seen(opened))


def settled(u: Tensor, opened: Opened) -> Tensor:
    """The running sum up to `lag` tokens before each token."""
    return _moment.settled(_projected(u), _seen(opened))


def _seen(opened: Opened | None) -> Opened | None:
    if opened is None:
        return None
    near = None if opened.near is None else _projected(opened.near)
    return opened._replace(keys=_projected(opened.keys), near=near)


def _projected(x: Tensor) -> Tensor:
    return x @ _turn(x.shape[-1]).to(x)


@lru_cache
def _turn(keys: int) -> Tensor:
    """`[K, K / 2]`: orthonormal columns, times `sqrt(K / r)` in all for a squared product."""
    rows = torch.randn(keys, keys, generator=torch.Generator().manual_seed(SEED)).double()
    turned, _ = torch.linalg.qr(rows)
    return turned[:, : kept(keys)] * (keys / kept(keys)) ** 0.5
