"""Gated DeltaProduct, FLA format (arXiv 2502.10297)."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.models._blocks import RMSNorm, ShortConvolution, convolve, heads
from mcretrofit.models._state import Context
from mcretrofit.ops import gated_delta_product
from mcretrofit.ops._call import call

MODEL_TYPES = ("gated_deltaproduct",)
ABOUT = {
    "memory": "deltaproduct",
    "layouts": ("FLA",),
    "parity": "flash-linear-attention 0.6",
    "tested": "its recurrent kernel in Triton's interpreter: prefill and a decoded step",
}
DEFAULTS = {
    "expand_v": 2.0,
    "head_dim": 256,
    "num_heads": 6,
    "use_output_gate": True,
    "use_forget_gate": False,
    "use_short_conv": True,
    "conv_size": 4,
    "allow_neg_eigval": False,
    "num_householder": 1,
}
chunk_gated_delta_product = partial(call, gated_delta_product)


class Mixer(nn.Module):
    """q, and n keys, values and writing strengths a token, through short convolutions."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__()
        self.layer, self.key, self.writes = layer, config.head_dim, config.num_householder
        self.value = int(config.head_dim * config.expand_v)
        self.strength = 2.0 if config.allow_neg_eigval else 1.0
        width, count = config.hidden_size, config.num_heads
        wide_k, wide_v = count * self.key, count * self.value
        self.q_proj = nn.Linear(width, wide_k, bias=False)
        self.k_proj = nn.Linear(width, wide_k * self.writes, bias=False)
        self.v_proj = nn.Linear(width, wide_v * self.writes, bias=False)
        self.b_proj = nn.Linear(width, count * self.writes, bias=False)
        if config.use_forget_gate:
            self.a_proj = nn.Linear(width, count, bias=False)
            self.A_log = nn.Parameter(torch.zeros(count))
            self.dt_bias = nn.Parameter(torch.zeros(count))
        if config.use_short_conv:
            self.q_conv1d = ShortConvolution(wide_k, config.conv_size)
            self.k_conv1d = ShortConvolution(wide_k * self.writes, config.conv_size)
            self.v_conv1d = ShortConvolution(wide_v * self.writes, config.conv_size)
        if config.use_output_gate:
            self.g_proj = nn.Linear(width, wide_v, bias=False)
        self.o_norm = RMSNorm(self.value, config.norm_eps)
        self.o_proj = nn.Linear(wide_v, width, bias=False)

    def start(self) -> None:
        """Fresh weights: the heads' decays spread from some 20 to 5,000 tokens."""
        if not hasattr(self, "dt_bias"):
            return
        count = self.dt_bias.numel()
        steps = torch.logspace(-1.3, -3.7, count) if count > 1 else torch.tensor([1e-3])
        with torch.no_grad():
            self.A_log.zero_()
            self.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))

    def _gate(self, x: Tensor) -> Tensor | None:
        """Log decays `[B, T, H]`."""
        if not hasattr(self, "a_proj"):
            return None
        steps = F.softplus(self.a_proj(x).float() + self.dt_bias.float())
        return -self.A_log.float().exp() * steps

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        x, state, n = hidden_states, context.state(self.layer), self.writes
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if hasattr(self, "q_conv1d"):
            q, k, v = convolve(self, (q, k, v), state, context)
        else:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        beta = self.b_proj(x).sigmoid() * self.strength
        k, v, beta = (s.unflatten(-1, (n, -1)).flatten(1, 2) for s in (k, v, beta))
        o, state["recurrent"] = chunk_gated_delta_product(
            q=heads(q, self.key),
            k=heads(k, self.key),
            v=heads(v, self.value),
            g=self._gate(x),
            beta=beta,
            num_householder=n,
            use_qk_l2norm_in_kernel=True,
            initial_state=state.get("recurrent"),
            output_final_state=context.cache is not None,
            valid=context.valid,
        )
        gate = heads(self.g_proj(x), self.value) if hasattr(self, "g_proj") else None
        return self.o_proj(self.o_norm(o, gate).flatten(-2))


def tiny() -> dict:
    """The smallest configuration that the laws run on: two writes a token, with a decay."""
    sizes = {"hidden_size": 32, "head_dim": 16, "num_heads": 2, "expand_v": 1.0}
    return {**sizes, "use_forget_gate": True, "num_householder": 2}
