"""Deep linear attention: a two-layer network as memory, written by gradients of `<M(k), v>`.

Our own format (arXiv 2602.24281, eq 30-33): config.json has `model_type` dla, the keys of `DEFAULTS`
and those of every family; tensors are named as in Gated DeltaNet, and under `model.layers.N.attn`
`up [H, K, 4 K]` and `down [H, 4 K, K]` (M_0; `weight [H, K, K]` where `memory` is linear),
`eta_proj.{weight [H, D], bias}` (step: `max_step` times its sigmoid) and, with `use_keep`,
`alpha_proj.{weight [H, D], bias}` (keep gate, sigmoid).
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.models._deep import DEEP, Deep, gate, spread_
from mcretrofit.models._deep import DEFAULTS as BLOCK
from mcretrofit.models._state import Context
from mcretrofit.ops import dla
from mcretrofit.ops._call import call

MODEL_TYPES = ("dla",)
ABOUT = {
    "memory": "mlp",
    "layouts": ("own",),
    "parity": "the paper's equations",
    "tested": "gradients by autograd, token by token in float64",
}
DEFAULTS = {**BLOCK, **DEEP, "max_step": 0.5, "use_keep": False}
chunk_dla = partial(call, dla)


class Mixer(Deep):
    """Step size and, where asked, a keep gate a head."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__(config, layer)
        self.eta_proj = nn.Linear(config.hidden_size, self.num_heads)
        if config.use_keep:
            self.alpha_proj = nn.Linear(config.hidden_size, self.num_heads)

    def start(self) -> None:
        """Fresh weights: small steps; kept for 20 to 5,000 tokens."""
        nn.init.constant_(self.eta_proj.bias, -1.5)
        if hasattr(self, "alpha_proj"):
            spread_(self.alpha_proj.bias)

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        x, state = hidden_states, context.state(self.layer)
        q, k, v = self.projected(x, state, context)
        keeps = hasattr(self, "alpha_proj")
        o, state["recurrent"] = chunk_dla(
            q=q,
            k=k,
            v=v,
            eta=gate(self.eta_proj, x).sigmoid() * self.max_step,
            g=F.logsigmoid(gate(self.alpha_proj, x)) if keeps else None,
            start=self.start_weights,
            inner_chunk=self.inner_chunk,
            where=self.where,
            initial_state=state.get("recurrent"),
            output_final_state=context.cache is not None,
            valid=context.valid,
        )
        return self.mixed(x, o)


def tiny() -> dict:
    """The smallest configuration that the laws run on."""
    return {"hidden_size": 32, "head_dim": 16, "num_heads": 2, "inner_chunk": 4, "use_keep": True}
