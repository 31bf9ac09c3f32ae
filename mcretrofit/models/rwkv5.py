"""RWKV-5.2, BlinkDL's own format (arXiv 2404.05892): one fixed decay a key channel."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.models._blocks import heads
from mcretrofit.models._rwkv import Block as RWKVBlock
from mcretrofit.models._rwkv import FeedForward, HeadNorm, Lerp, shift
from mcretrofit.models._rwkv import final_norm as final_norm
from mcretrofit.models._rwkv5_layout import from_layout as from_layout
from mcretrofit.models._state import Context
from mcretrofit.ops import rwkv6
from mcretrofit.ops._call import call, entry

MODEL_TYPES = ("rwkv5",)
ABOUT = {
    "memory": "rwkv6",
    "layouts": ("BlinkDL",),
    "parity": "golden logits of a third party, BlinkDL's formulas",
    "tested": "a small real checkpoint; token by token",
}
DEFAULTS = {
    "num_heads": 4,
    "hidden_ratio": 3.5,
    "hidden_act": "sqrelu",
    "norm_first": True,
    "norm_bias": True,
    "norm_eps": 1e-5,
    "group_norm_eps": 64e-5,
}
chunk_rwkv6 = entry(rwkv6, "chunk_rwkv6", partial(call, rwkv6))


class Mixer(nn.Module):
    """Token shift, fixed decays, a bonus for the current token, a gated norm on the read."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__()
        self.layer, width = layer, config.hidden_size
        self.key = width // config.num_heads
        for stream in "rkvg":
            setattr(self, f"{stream}_proj", Lerp(width, width))
        self.decay = nn.Parameter(torch.zeros(config.num_heads, self.key))
        self.bonus = nn.Parameter(torch.zeros(config.num_heads, self.key))
        self.g_norm = HeadNorm(width, config.group_norm_eps)
        self.o_proj = nn.Linear(width, width, bias=False)

    def start(self) -> None:
        """Fresh weights: half of the token before mixed in, decays spread from one to 400 tokens."""
        with torch.no_grad():
            for stream in "rkvg":
                getattr(self, f"{stream}_proj").mu.fill_(0.5)
            self.decay.copy_(torch.linspace(-6, 0, self.key).expand_as(self.decay))

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        state = context.state(self.layer)
        x, change, state["shift"] = shift(hidden_states, state.get("shift"), context)
        r, k, v = (heads(p(x, change), self.key) for p in (self.r_proj, self.k_proj, self.v_proj))
        o, state["recurrent"] = chunk_rwkv6(
            r=r,
            k=k,
            v=v,
            w=-self.decay.float().exp().expand(*r.shape),
            u=self.bonus,
            scale=1.0,
            initial_state=state.get("recurrent"),
            output_final_state=context.cache is not None,
            valid=context.valid,
        )
        return self.o_proj(self.g_norm(o.to(x.dtype)) * F.silu(self.g_proj(x, change)))


class Block(RWKVBlock):
    """The family's mixer and feed-forward, each behind its norm."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__(config, layer, Mixer(config, layer), FeedForward(config, layer))


def tiny() -> dict:
    """The smallest configuration that the laws run on."""
    return {"hidden_size": 32, "num_heads": 2}
