"""Gated DeltaProduct, FLA format (arXiv 2502.10297)."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from mcretrofit.models._blocks import heads
from mcretrofit.models._delta import DeltaMixer
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


class Mixer(DeltaMixer):
    """q, and n keys, values and writing strengths a token, through short convolutions."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__(config, layer)
        self.writes = config.num_householder
        self.strength = 2.0 if config.allow_neg_eigval else 1.0
        self.project(self.writes)
        self.b_proj = nn.Linear(self.width, self.heads * self.writes, bias=False)
        if config.use_forget_gate:
            self.a_proj = nn.Linear(self.width, self.heads, bias=False)
            self.forget()
        if config.use_short_conv:
            self.shorten(config.conv_size)
        self.finish(config, config.use_output_gate)

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        x, state, n = hidden_states, context.state(self.layer), self.writes
        q, k, v = self.streams(x, state, context)
        beta = self.b_proj(x).sigmoid() * self.strength
        k, v, beta = (s.unflatten(-1, (n, -1)).flatten(1, 2) for s in (k, v, beta))
        o, state["recurrent"] = chunk_gated_delta_product(
            q=heads(q, self.key),
            k=heads(k, self.key),
            v=heads(v, self.value),
            g=self.decays(x) if hasattr(self, "a_proj") else None,
            beta=beta,
            num_householder=n,
            use_qk_l2norm_in_kernel=True,
            initial_state=state.get("recurrent"),
            output_final_state=context.cache is not None,
            valid=context.valid,
        )
        return self.output(o, x)


def tiny() -> dict:
    """The smallest configuration that the laws run on: two writes a token, with a decay."""
    sizes = {"hidden_size": 32, "head_dim": 16, "num_heads": 2, "expand_v": 1.0}
    return {**sizes, "use_forget_gate": True, "num_householder": 2}
