"""Comba, FLA format (arXiv 2506.02475)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from mcretrofit.models._blocks import heads
from mcretrofit.models._delta import DeltaMixer
from mcretrofit.models._state import Context
from mcretrofit.ops import comba
from mcretrofit.ops._call import call

MODEL_TYPES = ("comba",)
ABOUT = {
    "memory": "rwkv7",
    "layouts": ("FLA",),
    "parity": "flash-linear-attention 0.6",
    "tested": "its kernels in Triton's interpreter: prefill and a decoded step",
}
# no inner decay or output correction to leave out: the format's blocks always have both
DEFAULTS = {
    "expand_v": 2.0,
    "head_dim": 256,
    "num_heads": 6,
    "num_v_heads": None,
    "use_output_gate": True,
    "use_short_conv": True,
    "conv_size": 4,
}
chunk_comba = partial(call, comba)


class Mixer(DeltaMixer):
    """q, k, v through short convolutions, a weaker key that recalls, a gated norm on the read."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__(config, layer)
        self.project()
        self.a_proj = nn.Linear(self.width, self.value_heads, bias=False)
        self.b_proj = nn.Linear(self.width, self.value_heads, bias=False)
        self.decay, self.D = (nn.Parameter(torch.ones(self.heads)) for _ in range(2))
        self.forget()
        if config.use_short_conv:
            self.shorten(config.conv_size)
        self.finish(config, config.use_output_gate, "sigmoid")

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        x, state = hidden_states, context.state(self.layer)
        q, k, v = self.streams(x, state, context)
        q, k = heads(q, self.key), heads(k, self.key)
        p = k * self.decay.sigmoid()[:, None]
        o, state["recurrent"] = chunk_comba(
            q=q - self.D[:, None] * p,
            k=k,
            v=heads(v, self.value),
            p=p,
            g=self.decays(x),
            beta=self.b_proj(x).sigmoid(),
            use_qk_l2norm_in_kernel=True,
            initial_state=state.get("recurrent"),
            output_final_state=context.cache is not None,
            valid=context.valid,
        )
        return self.output(o, x)


def tiny() -> dict:
    """The smallest configuration that the laws run on: grouped values."""
    return {"hidden_size": 32, "head_dim": 16, "num_heads": 1, "num_v_heads": 2, "expand_v": 1.0}
