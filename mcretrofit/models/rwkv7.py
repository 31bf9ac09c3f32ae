"""RWKV-7, FLA format and BlinkDL's own (arXiv 2503.14456)."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.errors import RetrofitError
from mcretrofit.models._blocks import heads
from mcretrofit.models._rwkv import Block as RWKVBlock
from mcretrofit.models._rwkv import HeadNorm, LowRank, shift
from mcretrofit.models._rwkv import final_norm as final_norm
from mcretrofit.models._rwkv7_layout import from_layout as from_layout
from mcretrofit.models._state import Context
from mcretrofit.ops import rwkv7
from mcretrofit.ops._call import call, l2norm

MODEL_TYPES = ("rwkv7",)
ABOUT = {
    "memory": "rwkv7",
    "layouts": ("FLA", "BlinkDL"),
    "parity": "flash-linear-attention 0.6, golden logits of a third party",
    "tested": "its kernels in Triton's interpreter: prefill and a decoded step; a small real checkpoint",
}
DEFAULTS = {
    "head_dim": 64,
    "num_heads": None,
    "decay_low_rank_dim": 64,
    "gate_low_rank_dim": 128,
    "a_low_rank_dim": 64,
    "v_low_rank_dim": 16,
    "hidden_act": "sqrelu",
    "norm_first": True,
    "norm_bias": True,
    "norm_eps": 1e-5,
    "group_norm_eps": None,
    "fuse_norm": True,
    "value_dim": None,
}
FASTEST = -0.6065306597126334  # -exp(-1/2), the log decay that a gate of one gives
chunk_rwkv7 = partial(call, rwkv7)


class Mixer(nn.Module):
    """Token shift, six mixed inputs, low-rank gates, a bonus for the current token on the read."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__()
        self.layer, width, values = layer, config.hidden_size, _values(config, layer)
        self.key = config.head_dim or width // config.num_heads
        self.count = width // self.key
        self.value, self.fused = values // self.count, config.fuse_norm
        for stream in "rwkvag":
            setattr(self, f"x_{stream}", nn.Parameter(torch.zeros(1, 1, width)))
        self.k_k, self.k_a = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.r_k = nn.Parameter(torch.zeros(self.count, self.key))
        self.r_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, values, bias=False)
        self.o_proj = nn.Linear(values, width, bias=False)
        plain, wide = nn.Identity(), self.key / 64
        self.w_lora = LowRank(width, width, _rank(config, "decay", 2.5 * wide), nn.Tanh())
        if layer > 0:
            self.v_lora = LowRank(width, values, _rank(config, "v", 1.7 * wide), plain)
        self.a_lora = LowRank(width, width, _rank(config, "a", 2.5 * wide), plain)
        self.g_lora = LowRank(width, values, _rank(config, "gate", 5.0), nn.Sigmoid(), bias=False)
        self.g_norm = HeadNorm(values, config.group_norm_eps or self.key * config.norm_eps)

    def start(self) -> None:
        """Fresh weights: half of the token before mixed in, decays spread from 3 to 700 tokens."""
        with torch.no_grad():
            for stream in "rwkvag":
                getattr(self, f"x_{stream}").fill_(0.5)
            self.w_lora.lora[2].bias.copy_(torch.linspace(-6, 0, self.key).repeat(self.count))

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        state = context.state(self.layer)
        x, change, state["shift"] = shift(hidden_states, state.get("shift"), context)
        xr, xw, xk, xv, xa, xg = (x + change * getattr(self, f"x_{s}") for s in "rwkvag")
        r, k, v = self.r_proj(xr), self.k_proj(xk), self.v_proj(xv)
        w, a = FASTEST * self.w_lora(xw).sigmoid(), self.a_lora(xa).sigmoid()
        if self.layer == 0:
            context.shared["v_first"] = v
        else:
            v = torch.lerp(v, context.shared["v_first"], self.v_lora(xv).sigmoid())
        kk = heads(k * self.k_k, self.key)
        # BlinkDL clamps the norm where FLA adds an epsilon under the root
        kk = (l2norm(kk) if self.fused else F.normalize(kk, dim=-1)).to(k.dtype)
        k = k + k * (a - 1) * self.k_a
        r, w, k, a, v = *(heads(s, self.key) for s in (r, w, k, a)), heads(v, self.value)
        o, state["recurrent"] = chunk_rwkv7(
            r=r,
            w=w,
            k=k,
            v=v,
            a=-kk,
            b=kk * a,
            scale=1.0,
            initial_state=state.get("recurrent"),
            output_final_state=context.cache is not None,
            valid=context.valid,
        )
        bonus = ((r * k * self.r_k).sum(-1, keepdim=True) * v).flatten(-2)
        return self.o_proj((self.g_norm(o) + bonus) * self.g_lora(xg))


class FeedForward(nn.Module):
    """`V relu(K x')^2`, x' the token mixed with the one before it."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__()
        self.layer, width, hidden = layer, config.hidden_size, config.intermediate_size
        if config.hidden_act != "sqrelu":
            raise RetrofitError(
                f"config: hidden_act {config.hidden_act!r} is not supported (sqrelu is)"
            )
        hidden = hidden or 32 * -(-int(width * (config.hidden_ratio or 4)) // 32)
        self.x_k = nn.Parameter(torch.zeros(width))
        self.key = nn.Linear(width, hidden, bias=False)
        self.value = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        state = context.state(self.layer)
        x, change, state["ffn"] = shift(x, state.get("ffn"), context)
        return self.value(F.relu(self.key(x + change * self.x_k)).square())


class Block(RWKVBlock):
    """The family's mixer and feed-forward, each behind its norm."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__(config, layer, Mixer(config, layer), FeedForward(config, layer))


def _values(config, layer: int) -> int:  # noqa: ANN001
    given = config.value_dim or config.hidden_size
    return given if isinstance(given, int) else given[layer]


def _rank(config, name: str, times: float) -> int:  # noqa: ANN001
    given = getattr(config, f"{name}_low_rank_dim")
    return given or max(32, round(times * config.hidden_size**0.5 / 32) * 32)


def tiny() -> dict:
    """The smallest configuration that the laws run on: values wider than keys."""
    ranks = dict.fromkeys(("decay", "gate", "a", "v"), 4)
    low = {f"{name}_low_rank_dim": rank for name, rank in ranks.items()}
    return {"hidden_size": 32, "head_dim": 16, "value_dim": 64, **low}
