"""Gated DeltaNet, FLA format (arXiv 2412.06464)."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from mcretrofit.models._blocks import heads
from mcretrofit.models._delta import DeltaMixer
from mcretrofit.models._state import Context
from mcretrofit.ops import gated_delta_rule
from mcretrofit.ops._call import call

MODEL_TYPES = ("gated_deltanet",)
ABOUT = {
    "memory": "delta",
    "layouts": ("FLA",),
    "parity": "flash-linear-attention 0.6",
    "tested": "its kernels in Triton's interpreter: prefill and a decoded step",
}
DEFAULTS = {
    "expand_v": 2.0,
    "head_dim": 256,
    "num_heads": 6,
    "num_v_heads": None,
    "use_gate": True,
    "use_short_conv": True,
    "conv_size": 4,
    "allow_neg_eigval": False,
    "output_gate_activation": "swish",
}
chunk_gated_delta_rule = partial(call, gated_delta_rule)


class Mixer(DeltaMixer):
    """q, k, v through short convolutions, raw gates to the op, a gated norm on the read."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__(config, layer)
        self.allow_neg_eigval = config.allow_neg_eigval
        self.project()
        self.a_proj = nn.Linear(self.width, self.value_heads, bias=False)
        self.b_proj = nn.Linear(self.width, self.value_heads, bias=False)
        self.forget()
        if config.use_short_conv:
            self.shorten(config.conv_size)
        self.finish(config, config.use_gate, config.output_gate_activation)

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        x, state = hidden_states, context.state(self.layer)
        q, k, v = self.streams(x, state, context)
        o, state["recurrent"] = chunk_gated_delta_rule(
            q=heads(q, self.key),
            k=heads(k, self.key),
            v=heads(v, self.value),
            g=self.a_proj(x),
            beta=self.b_proj(x),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            initial_state=state.get("recurrent"),
            output_final_state=context.cache is not None,
            valid=context.valid,
        )
        return self.output(o, x)


def tiny() -> dict:
    """The smallest configuration that the laws run on: grouped values."""
    return {"hidden_size": 32, "head_dim": 16, "num_heads": 1, "num_v_heads": 2, "expand_v": 1.0}
