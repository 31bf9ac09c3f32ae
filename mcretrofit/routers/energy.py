"""Read energy: `s_i = ||M_i q_t||` over the mean of all; keeps nothing, but looks at every state.

Beyond the paper. It needs what segments wrote alone (`reset` or `carry_delta`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcretrofit.memories._networks import gain, gains
from mcretrofit.routers import Asked, Opened
from mcretrofit.segments import Bank

UNIT, USES_QUERY, POSITIVE, TEMPERATURE = False, True, True, 5.0
STATES = True


def width(keys: int) -> int:
    """Nothing: the states are there anyway."""
    return 0


def summarise(keys: Tensor, valid: Tensor) -> Tensor:
    """`[B, S, C, H, K]` -> `[B, S, H, 0]`."""
    return keys.new_zeros(*keys.shape[:2], keys.shape[3], 0)


def score(asked: Asked, bank: Bank, opened: Opened | None) -> tuple[Tensor, Tensor | None]:
    """Norms of the reads of every visible state and of the online read, over their mean."""
    norms = [read.norm(dim=-1) for read in gains(bank.states, asked.q)]
    cached = torch.stack(norms, -1)
    online = gain(bank.states, asked.online, asked.q).norm(dim=-1)
    seen = bank.visible[:, :, None].to(cached.dtype)
    mean = ((cached * seen).sum(-1) + online) / (seen.sum(-1) + 1)
    mean = mean.clamp_min(1e-6)
    return cached / mean[..., None], online / mean
