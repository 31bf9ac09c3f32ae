"""The gate of one mixer: which heads and channels are cached, score statistics, and trainable `u`.

Its parameters are the only ones that a retrofit adds (`*.mc.*`); they start as the identity:
`u_t = q_t + x_t W_u` with `W_u = 0` (or `A B` of a low rank with `B = 0`), an online bias of zero and a
log temperature of zero a head (arXiv 2602.24281, eq 10; MATH 9).

Whitening turns the question alone: with `E[k k^T] = S` of unit keys it asks `S^-1/2 q~`, where `q~` is
`S^-1/2 q` of length one. Then every question scores the same on an ordinary segment, whatever
direction the keys share, and a key that is rare counts for more than one that every segment holds.
Where few directions are looked at, the matrix is `S^-1/2 V` instead, with `V` the axes of the whitened
questions, the longest first: questions and keys are compared along its first columns alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Gate(nn.Module):
    """`[B, T, D]` hidden states and `[B, T, H, K]` queries of the cached heads -> what they ask with."""

    def __init__(
        self, heads: list[int], keys: int, width: int = 0, whiten: bool = False, rank: int = 0
    ) -> None:
        super().__init__()
        count = len(heads)
        self.heads = heads
        self.register_buffer("mask", torch.ones(count, keys))
        self.register_buffer("mean", torch.zeros(count))
        self.register_buffer("std", torch.ones(count))
        self.register_buffer("whiten", torch.eye(keys).repeat(count, 1, 1) if whiten else None)
        low = min(rank, width)
        self.down = nn.Parameter(torch.zeros(low, width)) if low else None
        self.weight = nn.Parameter(torch.zeros(count * keys, low or width)) if width else None
        self.bias = nn.Parameter(torch.zeros(count)) if width else None
        self.heat = nn.Parameter(torch.zeros(count)) if width else None

    def masked(self, x: Tensor) -> Tensor:
        """`x [..., H, K]` with the channels that are not cached set to zero."""
        return x * self.mask.to(x.dtype)

    def unit(self, x: Tensor) -> Tensor:
        """Masked and of length one."""
        return F.normalize(self.masked(x), dim=-1)

    def along(self, x: Tensor, first: int) -> Tensor:
        """`x [..., H, K]` along the `first` directions that questions use most."""
        if self.whiten is None:
            return x[..., :first]
        return torch.einsum("...hk,hkl->...hl", x, self.whiten[..., :first].to(x.dtype))

    def key(self, k: Tensor, unit: bool, first: int = 0) -> Tensor:
        """What a router keeps summaries of; `first` directions alone where that is not 0."""
        if not unit:
            return self.masked(k)
        return self.along(self.unit(k), first) if first else self.unit(k)

    def whitened(self, u: Tensor) -> Tensor:
        """What `u` asks once the keys' own second moment is taken out; `u` itself without whitening."""
        if self.whiten is None:
            return u
        matrix = self.whiten.to(u.dtype)
        turned = F.normalize(torch.einsum("...hk,hkl->...hl", u, matrix), dim=-1)
        return torch.einsum("...hk,hkl->...hl", turned, matrix)

    def query(
        self, q: Tensor, x: Tensor | None, unit: bool, uses_query: bool, first: int = 0
    ) -> Tensor:
        """What tokens ask with: their read query, plus `x W_u` once there is a trainable gate.

        Unit questions ask along `first` directions alone where that is not 0.
        """
        u = self._asked(q, x, unit, uses_query)
        return F.normalize(self.along(u, first), dim=-1) if unit and first else self.whitened(u)

    def _asked(self, q: Tensor, x: Tensor | None, unit: bool, uses_query: bool) -> Tensor:
        u = (self.unit(q) if unit else self.masked(q)) if uses_query else torch.zeros_like(q)
        if self.weight is None or x is None:
            return u
        x = x if self.down is None else F.linear(x, self.down.to(x.dtype))
        more = F.linear(x, self.weight.to(x.dtype)).unflatten(-1, (len(self.heads), -1)).to(u.dtype)
        if not unit:
            return u + more
        # a difference, so that a gate of zero asks bit for bit what no gate asks
        return u + (F.normalize(u + more, dim=-1) - F.normalize(u, dim=-1))

    def heated(self, temperature: float | Tensor) -> float | Tensor:
        """The temperature, of each head `[H]` once it is trainable."""
        return temperature if self.heat is None else temperature * self.heat.exp()

    def biased(self, online: Tensor) -> Tensor:
        """The online read's logit `[B, T, H]` with its bias."""
        return online if self.bias is None else online + self.bias.to(online.dtype)
