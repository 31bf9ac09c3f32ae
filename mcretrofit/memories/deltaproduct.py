"""Several delta-rule writes a token, then one read: DeltaProduct (arXiv 2502.10297).

`S_t = H_n ... H_1 a_t S_{t-1} + ...`, each `H_j = I - beta_j k_j k_j^T` with its own value. The last
write's key is the token's own (`k`, `v`, `beta`); `a` holds those before it, packed `[k, v, beta]`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.memories import Streams, _delta

MERGES = False


def packed(k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Earlier writes `[B, T, n, H, ...]`, in order, as one stream `[B, T, H, n (K + V + 1)]`."""
    return torch.cat([k, v, beta[..., None]], -1).transpose(2, 3).flatten(-2)


def _spread(streams: Streams) -> tuple[Streams, int]:
    """Every write as a token of its own, only the last of which reads; writes a token."""
    q, k, v = (s[:, :, None] for s in streams[:3])
    beta, decay = streams.beta[:, :, None], streams.decay
    if streams.a is None:
        return streams, 1
    sizes = (k.shape[-1], v.shape[-1], 1)
    before = streams.a.unflatten(-1, (-1, sum(sizes))).transpose(2, 3)
    first_k, first_v, first_beta = before.split(sizes, -1)
    count = before.shape[2]
    more = (q, torch.zeros_like(q).expand(-1, -1, count, -1, -1))
    q = torch.cat(more[::-1], 2)
    k, v = torch.cat([first_k, k], 2), torch.cat([first_v, v], 2)
    beta = torch.cat([first_beta[..., 0], beta], 2)
    if decay is not None:
        # once a token, before its first write
        rest = torch.zeros_like(decay)[:, :, None].expand(-1, -1, count, -1)
        decay = torch.cat([decay[:, :, None], rest], 2).flatten(1, 2)
    return Streams(*(s.flatten(1, 2) for s in (q, k, v)), decay, beta.flatten(1, 2)), count + 1


def step(streams: Streams, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: its writes one after the other, then the read."""
    spread, count = _spread(streams)
    for i in range(count):
        out, state = _delta.step(spread.map(lambda s, i=i: s[:, i : i + 1]), state)
    return out, state


def chunks(streams: Streams, state: Tensor, every: int) -> tuple[Tensor, Tensor, Tensor]:
    """Many tokens by tiles of the delta rule."""
    spread, count = _spread(streams)
    out, state, ends = _delta.chunks(spread, state, every * count)
    return out[:, count - 1 :: count], state, ends


def example(batch: int, length: int, heads: int, width: int) -> Streams:
    """Random streams: two writes a token, one decay a head."""
    shape = (batch, length, heads, width)
    q, k, first = (F.normalize(torch.randn(shape), dim=-1) for _ in range(3))
    beta, decay = torch.rand(shape[:3]), F.logsigmoid(torch.randn(shape[:3])) / 4
    before = (x[:, :, None] for x in (first, torch.randn(shape), torch.rand(shape[:3])))
    return Streams(q, k, torch.randn(shape), decay, beta, packed(*before))
