"""Sliding-window linear attention: a gated linear attention that writes c tokens a step.

Our own format (arXiv 2602.24281, eq 26-29): config.json has `model_type` swla, the keys of `DEFAULTS`
and those of every family; tensors are named as in Gated DeltaNet, and
`model.layers.N.attn.alpha_proj.{weight [H, D], bias}` (keep gate, sigmoid) and
`model.layers.N.attn.write_proj.{weight [H c, D], bias}` (the weight of token t - i is entry i of a head).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.errors import RetrofitError
from mcretrofit.models._deep import DEFAULTS as BLOCK
from mcretrofit.models._deep import Projected, gate, spread_
from mcretrofit.models._state import Context
from mcretrofit.ops import swla
from mcretrofit.ops._call import call

MODEL_TYPES = ("swla",)
ABOUT = {
    "memory": "swla",
    "layouts": ("own",),
    "parity": "the paper's equations",
    "tested": "its recurrence token by token in float64",
}
DEFAULTS = {**BLOCK, "expand_v": 1.0, "window": 2}
chunk_swla = partial(call, swla)


class Mixer(Projected):
    """Keep gate and writing weights a head, each a sigmoid of a projection."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__(config, layer, config.expand_v)
        if type(config.window) is not int or config.window < 1:
            raise RetrofitError(f"config: window is {config.window!r}, not a number of tokens")
        self.window = config.window
        self.alpha_proj = nn.Linear(config.hidden_size, self.num_heads)
        self.write_proj = nn.Linear(config.hidden_size, self.num_heads * self.window)

    def start(self) -> None:
        """Fresh weights: decays from 20 to 5,000 tokens; most of a token is written at once."""
        spread_(self.alpha_proj.bias)
        first = torch.full((self.num_heads, self.window), -2.0)
        first[:, 0] = 2.0
        with torch.no_grad():
            self.write_proj.bias.copy_(first.flatten())

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        x, state = hidden_states, context.state(self.layer)
        q, k, v = self.projected(x, state, context)
        o, state["recurrent"] = chunk_swla(
            q=q,
            k=k,
            v=v,
            g=F.logsigmoid(gate(self.alpha_proj, x)),
            beta=gate(self.write_proj, x).sigmoid().unflatten(-1, (-1, self.window)),
            initial_state=state.get("recurrent"),
            output_final_state=context.cache is not None,
            valid=context.valid,
        )
        return self.mixed(x, o)


def tiny() -> dict:
    """The smallest configuration that the laws run on."""
    return {"hidden_size": 32, "head_dim": 16, "num_heads": 2, "window": 3}
