"""Titans' neural memory as the only mixer: gradient descent with momentum on `|M(k) - v|^2`.

Our own format (arXiv 2602.24281, eq 34-36; 2501.00663): config.json has `model_type` titans, the keys of
`DEFAULTS` and those of every family; tensors are named as in Gated DeltaNet, and under
`model.layers.N.attn` `up [H, K, 4 K]` and `down [H, 4 K, K]` (M_0; `weight [H, K, K]` where `memory` is
linear) and `{alpha,beta,eta}_proj.{weight [H, D], bias}`: sigmoids give what is kept of the weights and
of the momentum, and the step as a share of `max_step` (times what is not kept of the momentum).
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.models._deep import DEEP, Deep, gate, spread_
from mcretrofit.models._deep import DEFAULTS as BLOCK
from mcretrofit.models._state import Context
from mcretrofit.ops import titans
from mcretrofit.ops._call import call

MODEL_TYPES = ("titans",)
ABOUT = {
    "memory": "mlp",
    "layouts": ("own",),
    "parity": "the paper's equations",
    "tested": "gradients by autograd, token by token in float64",
}
DEFAULTS = {**BLOCK, **DEEP, "max_step": 0.1}
chunk_titans = partial(call, titans)


class Mixer(Deep):
    """What is kept, momentum and step size a head."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__(config, layer)
        self.alpha_proj = nn.Linear(config.hidden_size, self.num_heads)
        self.beta_proj = nn.Linear(config.hidden_size, self.num_heads)
        self.eta_proj = nn.Linear(config.hidden_size, self.num_heads)

    def start(self) -> None:
        """Fresh weights: small steps, half of the momentum, kept for 20 to 5,000 tokens."""
        nn.init.constant_(self.eta_proj.bias, -1.5)
        nn.init.zeros_(self.beta_proj.bias)
        spread_(self.alpha_proj.bias)

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        x, state = hidden_states, context.state(self.layer)
        q, k, v = self.projected(x, state, context)
        goes_on = gate(self.beta_proj, x)
        # a step goes on with the momentum: all of it together stays below max_step
        eta = gate(self.eta_proj, x).sigmoid() * goes_on.neg().sigmoid() * self.max_step
        o, state["recurrent"] = chunk_titans(
            q=q,
            k=k,
            v=v,
            g=F.logsigmoid(gate(self.alpha_proj, x)),
            momentum=F.logsigmoid(goes_on),
            eta=eta,
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
    return {"hidden_size": 32, "head_dim": 16, "num_heads": 2, "inner_chunk": 4}
