"""Kimi Delta Attention, FLA format (arXiv 2510.26692)."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.models._blocks import RMSNorm, ShortConvolution, convolve, heads
from mcretrofit.models._state import Context
from mcretrofit.ops import kda
from mcretrofit.ops._call import call

MODEL_TYPES = ("kda",)
ABOUT = {
    "memory": "delta",
    "layouts": ("FLA",),
    "parity": "flash-linear-attention 0.6",
    "tested": "its kernels in Triton's interpreter: prefill and a decoded step",
}
DEFAULTS = {
    "expand_v": 1.0,
    "head_dim": 128,
    "num_heads": 16,
    "num_v_heads": None,
    "use_short_conv": True,
    "conv_size": 4,
    "allow_neg_eigval": False,
    "lower_bound": None,
}
chunk_kda = partial(call, kda)


class Mixer(nn.Module):
    """q, k, v through short convolutions, a low-rank decay a channel, a gated norm on the read."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__()
        self.layer, self.key = layer, config.head_dim
        self.value = int(config.head_dim * config.expand_v)
        self.allow_neg_eigval, self.lower_bound = config.allow_neg_eigval, config.lower_bound
        width, n_k = config.hidden_size, config.num_heads
        n_v = config.num_v_heads or n_k
        wide_k, wide_v = n_k * self.key, n_v * self.value
        self.q_proj = nn.Linear(width, wide_k, bias=False)
        self.k_proj = nn.Linear(width, wide_k, bias=False)
        self.v_proj = nn.Linear(width, wide_v, bias=False)
        if config.use_short_conv:
            self.q_conv1d = ShortConvolution(wide_k, config.conv_size)
            self.k_conv1d = ShortConvolution(wide_k, config.conv_size)
            self.v_conv1d = ShortConvolution(wide_v, config.conv_size)
        self.f_proj = nn.Sequential(
            nn.Linear(width, self.value, bias=False),
            nn.Linear(self.value, n_v * self.key, bias=False),
        )
        self.b_proj = nn.Linear(width, n_v, bias=False)
        self.A_log = nn.Parameter(torch.zeros(n_v))
        self.dt_bias = nn.Parameter(torch.zeros(n_v * self.key))
        self.g_proj = nn.Sequential(
            nn.Linear(width, self.value, bias=False), nn.Linear(self.value, wide_v)
        )
        self.o_norm = RMSNorm(self.value, config.norm_eps, True, "sigmoid")
        self.o_proj = nn.Linear(wide_v, width, bias=False)

    def start(self) -> None:
        """Fresh weights: every head's decays spread from some 20 to 5,000 tokens."""
        steps = torch.logspace(-1.3, -3.7, self.key)
        spread = steps + torch.log(-torch.expm1(-steps))
        with torch.no_grad():
            self.A_log.zero_()
            self.dt_bias.copy_(spread.repeat(self.A_log.numel()))

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        x, state = hidden_states, context.state(self.layer)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if hasattr(self, "q_conv1d"):
            q, k, v = convolve(self, (q, k, v), state, context)
        else:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        o, state["recurrent"] = chunk_kda(
            q=heads(q, self.key),
            k=heads(k, self.key),
            v=heads(v, self.value),
            g=heads(self.f_proj(x), self.key),
            beta=self.b_proj(x),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            lower_bound=self.lower_bound,
            initial_state=state.get("recurrent"),
            output_final_state=context.cache is not None,
            valid=context.valid,
        )
        return self.o_proj(self.o_norm(o, heads(self.g_proj(x), self.value)).flatten(-2))


def tiny() -> dict:
    """The smallest configuration that the laws run on: grouped values."""
    return {"hidden_size": 32, "head_dim": 16, "num_heads": 1, "num_v_heads": 2}
