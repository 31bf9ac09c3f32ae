"""What the mixers of delta rules share: projections, short convolutions, a gated norm on the read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.models._blocks import RMSNorm, ShortConvolution, convolve, heads
from mcretrofit.models._state import Context


class DeltaMixer(nn.Module):
    """The sizes; a family adds its parts in the order that its fresh weights are drawn in."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__()
        self.layer, self.key = layer, config.head_dim
        self.value = int(config.head_dim * config.expand_v)
        self.heads = config.num_heads
        self.value_heads = getattr(config, "num_v_heads", None) or self.heads
        self.width = config.hidden_size

    def project(self, writes: int = 1) -> None:
        """`q_proj`, and `k_proj` and `v_proj` for so many writes a token."""
        keys, values = self.heads * self.key, self.value_heads * self.value
        self.q_proj = nn.Linear(self.width, keys, bias=False)
        self.k_proj = nn.Linear(self.width, keys * writes, bias=False)
        self.v_proj = nn.Linear(self.width, values * writes, bias=False)

    def shorten(self, kernel: int) -> None:
        """A short convolution after each of them."""
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            ShortConvolution(projection.out_features, kernel)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )

    def forget(self) -> None:
        """`A_log` and `dt_bias`, one a head."""
        self.A_log = nn.Parameter(torch.zeros(self.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.value_heads))

    def finish(self, config, gate: bool, activation: str = "swish") -> None:  # noqa: ANN001
        """The output's gate, its norm and `o_proj`."""
        values = self.value_heads * self.value
        if gate:
            self.g_proj = nn.Linear(self.width, values, bias=False)
        self.o_norm = RMSNorm(self.value, config.norm_eps, True, activation)
        self.o_proj = nn.Linear(values, self.width, bias=False)

    def start(self) -> None:
        """Fresh weights: the heads' decays spread from some 20 to 5,000 tokens."""
        if not hasattr(self, "dt_bias"):
            return
        # several a head (a decay a channel) or one
        count = self.dt_bias.numel() // self.A_log.numel()
        count = count if count > 1 else self.dt_bias.numel()
        steps = torch.logspace(-1.3, -3.7, count) if count > 1 else torch.tensor([1e-3])
        spread = steps + torch.log(-torch.expm1(-steps))
        with torch.no_grad():
            self.A_log.zero_()
            self.dt_bias.copy_(spread.repeat(self.dt_bias.numel() // count))

    def streams(self, x: Tensor, state: dict, context: Context) -> list[Tensor]:
        """q, k, v `[B, T, ...]` of hidden states, heads not split yet."""
        made = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if hasattr(self, "q_conv1d"):
            return convolve(self, made, state, context)
        return [F.silu(one) for one in made]

    def decays(self, x: Tensor) -> Tensor:
        """Log decays `[B, T, H]` of `a_proj`."""
        steps = F.softplus(self.a_proj(x).float() + self.dt_bias.float())
        return -self.A_log.float().exp() * steps

    def output(self, read: Tensor, x: Tensor) -> Tensor:
        """`[B, T, H, V]` normed, gated by `x`, and projected."""
        gate = heads(self.g_proj(x), self.value) if hasattr(self, "g_proj") else None
        return self.o_proj(self.o_norm(read, gate).flatten(-2))
