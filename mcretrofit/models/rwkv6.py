"""RWKV-6, FLA format and BlinkDL's own (arXiv 2404.05892): data-dependent mixes and decays."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.models._blocks import heads, whole
from mcretrofit.models._rwkv import Block as RWKVBlock
from mcretrofit.models._rwkv import FeedForward, HeadNorm, Lerp, LowRank, shift
from mcretrofit.models._rwkv import final_norm as final_norm
from mcretrofit.models._rwkv6_layout import STREAMS
from mcretrofit.models._rwkv6_layout import from_layout as from_layout
from mcretrofit.models._state import Context
from mcretrofit.ops import rwkv6
from mcretrofit.ops._call import call, entry

MODEL_TYPES = ("rwkv6",)
ABOUT = {
    "memory": "rwkv6",
    "layouts": ("FLA", "BlinkDL"),
    "parity": "flash-linear-attention 0.6, BlinkDL's formulas",
    "tested": "its kernels in Triton's interpreter: prefill and a decoded step; token by token",
}
DEFAULTS = {
    "expand_k": 0.5,
    "expand_v": 1.0,
    "hidden_ratio": 3.5,
    "num_heads": 4,
    "proj_low_rank_dim": 32,
    "gate_low_rank_dim": 64,
    "hidden_act": "sqrelu",
    "norm_first": True,
    "norm_bias": True,
    "norm_eps": 1e-5,
    "group_norm_eps": None,
}
chunk_rwkv6 = entry(rwkv6, "chunk_rwkv6", partial(call, rwkv6))


class Mixer(nn.Module):
    """Token shift by low-rank mixes, low-rank decays, a bonus for the current token."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__()
        self.layer, self.count, width = layer, config.num_heads, config.hidden_size
        wide_k = whole(config, config.expand_k, "expand_k")
        wide_v = whole(config, config.expand_v, "expand_v")
        self.key, self.value = wide_k // self.count, wide_v // self.count
        rank = 5 * config.proj_low_rank_dim
        second = nn.Linear(rank, width, bias=False)
        self.x_proj = nn.Sequential(Lerp(width, rank), nn.Tanh(), second)
        for stream in STREAMS:
            setattr(self, f"x_{stream}", nn.Parameter(torch.zeros(width)))
        for stream, out in zip("rkvg", (wide_k, wide_k, wide_v, wide_v), strict=True):
            setattr(self, f"{stream}_proj", _named(nn.Linear(width, out, bias=False)))
        self.w_proj = _named(LowRank(width, wide_k, config.gate_low_rank_dim, nn.Tanh()))
        self.bonus = nn.Parameter(torch.zeros(self.count, self.key))
        self.g_norm = HeadNorm(wide_v, config.group_norm_eps or config.norm_eps)
        self.o_proj = nn.Linear(wide_v, width, bias=False)

    def start(self) -> None:
        """Fresh weights: half of the token before mixed in, decays spread from one to 400 tokens."""
        with torch.no_grad():
            self.x_proj[0].mu.fill_(0.5)
            for stream in STREAMS:
                getattr(self, f"x_{stream}").fill_(0.5)
            spread = torch.linspace(-6, 0, self.key).repeat(self.count)
            self.w_proj.linear.lora[2].bias.copy_(spread)

    def _mixed(self, x: Tensor, change: Tensor) -> list[Tensor]:
        """`x` mixed with the token before it, five times over."""
        low = self.x_proj[1](self.x_proj[0](x, change)).unflatten(-1, (5, -1))
        weight = self.x_proj[2].weight.unflatten(-1, (5, -1))
        more = torch.einsum("btnr,hnr->btnh", low, weight).unbind(-2)
        return [
            x + change * (getattr(self, f"x_{s}") + m) for s, m in zip(STREAMS, more, strict=True)
        ]

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        state = context.state(self.layer)
        x, change, state["shift"] = shift(hidden_states, state.get("shift"), context)
        xr, xw, xk, xv, xg = self._mixed(x, change)
        r, k = heads(self.r_proj(xr), self.key), heads(self.k_proj(xk), self.key)
        o, state["recurrent"] = chunk_rwkv6(
            r=r,
            k=k,
            v=heads(self.v_proj(xv), self.value),
            w=-heads(self.w_proj(xw), self.key).float().exp(),
            u=self.bonus,
            scale=1.0,
            initial_state=state.get("recurrent"),
            output_final_state=context.cache is not None,
            valid=context.valid,
        )
        return self.o_proj(self.g_norm(o.to(x.dtype)) * F.silu(self.g_proj(xg)))


class Block(RWKVBlock):
    """The family's mixer and feed-forward, each behind its norm."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__(config, layer, Mixer(config, layer), FeedForward(config, layer))


def _named(module: nn.Module) -> nn.Sequential:
    """The module under the name `linear`, as the format has it."""
    return nn.Sequential(OrderedDict(linear=module))


def tiny() -> dict:
    """The smallest configuration that the laws run on: values wider than keys."""
    low = {"proj_low_rank_dim": 4, "gate_low_rank_dim": 4}
    return {"hidden_size": 32, "num_heads": 2, **low}
