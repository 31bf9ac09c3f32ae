"""Read energy: `s_i = ||M_i q_t||` over the mean of all; keeps nothing, but looks at every state.

Beyond the paper. It needs what segments wrote alone (`reset` or `carry_delta`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcretrofit.routers import Asked, Opened
from mcretrofit.segments import Bank

UNIT, USES_QUERY, POSITIVE, TEMPERATURE = False, True, True, 5.0


def width(keys: int) -> int:
    """Nothing: the states are there anyway."""
    return 0


def summarise(keys: Tensor, valid: Tensor) -> Tensor:
    """`[B, S, C, H, K]` -> `[B, S, H, 0]`."""
    return keys.new_zeros(*keys.shape[:2], keys.shape[3], 0)


def score(asked: Asked, bank: Bank, opened: Opened | None) -> tuple[Tensor, Tensor | None]:
    """Norms of the reads of every visible state and of the online read, over their mean."""
    q = asked.q.transpose(1, 2)
    states = bank.states.transpose(1, 2)
    norms = [(q @ states[:, :, i].to(q.dtype)).norm(dim=-1) for i in range(states.shape[2])]
    cached, online = torch.stack(norms, -1).transpose(1, 2), asked.online.norm(dim=-1)
    seen = bank.visible[:, :, None].to(cached.dtype)
    mean = ((cached * seen).sum(-1) + online) / (seen.sum(-1) + 1)
    mean = mean.clamp_min(1e-6)
    return cached / mean[..., None], online / mean
