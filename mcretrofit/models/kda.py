"""Kimi Delta Attention, FLA format (arXiv 2510.26692)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from mcretrofit.models._blocks import heads
from mcretrofit.models._delta import DeltaMixer
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


class Mixer(DeltaMixer):
    """q, k, v through short convolutions, a low-rank decay a channel, a gated norm on the read."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__(config, layer)
        self.allow_neg_eigval, self.lower_bound = config.allow_neg_eigval, config.lower_bound
        self.project()
        if config.use_short_conv:
            self.shorten(config.conv_size)
        channels = self.value_heads * self.key
        self.f_proj = self._low_rank(channels, bias=False)
        self.b_proj = nn.Linear(self.width, self.value_heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(channels))
        self.finish(config, False, "sigmoid")
        self.g_proj = self._low_rank(self.value_heads * self.value)

    def _low_rank(self, count: int, bias: bool = True) -> nn.Sequential:
        first = nn.Linear(self.width, self.value, bias=False)
        return nn.Sequential(first, nn.Linear(self.value, count, bias=bias))

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        x, state = hidden_states, context.state(self.layer)
        q, k, v = self.streams(x, state, context)
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
        return self.output(o, x)


def tiny() -> dict:
    """The smallest configuration that the laws run on: grouped values."""
    return {"hidden_size": 32, "head_dim": 16, "num_heads": 1, "num_v_heads": 2}
