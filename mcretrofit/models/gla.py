"""Gated linear attention, FLA format (arXiv 2312.06635)."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.models._blocks import RMSNorm, ShortConvolution, convolve, heads, whole
from mcretrofit.models._feature_maps import activation
from mcretrofit.models._state import Context
from mcretrofit.ops import gla
from mcretrofit.ops._call import call

MODEL_TYPES = ("gla",)
ABOUT = {
    "memory": "linear",
    "layouts": ("FLA",),
    "parity": "flash-linear-attention 0.6",
    "tested": "its kernels in Triton's interpreter: prefill and a decoded step",
}
DEFAULTS = {
    "expand_k": 0.5,
    "expand_v": 1.0,
    "num_heads": 4,
    "num_kv_heads": None,
    "feature_map": None,
    "use_short_conv": False,
    "conv_size": 4,
    "use_output_gate": True,
    "clamp_min": None,
    "elementwise_affine": True,
    "fuse_norm": True,
    "gate_low_rank_dim": 16,
    "gate_logit_normalizer": 16,
}
chunk_gla = partial(call, gla)


class Mixer(nn.Module):
    """q, k, v, a low-rank log decay a key channel, a gated norm on the read."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__()
        self.layer, self.num_heads = layer, config.num_heads
        self.groups = config.num_heads // (config.num_kv_heads or config.num_heads)
        self.normalizer, self.clamp_min = config.gate_logit_normalizer, config.clamp_min
        width, wide_k = config.hidden_size, whole(config, config.expand_k, "expand_k")
        wide_v = whole(config, config.expand_v, "expand_v")
        self.feature_map = activation(config.feature_map)
        self.key, self.value = wide_k // self.num_heads, wide_v // self.num_heads
        self.q_proj = nn.Linear(width, wide_k, bias=False)
        self.k_proj = nn.Linear(width, wide_k // self.groups, bias=False)
        self.v_proj = nn.Linear(width, wide_v // self.groups, bias=False)
        if config.use_short_conv:
            self.q_conv1d = ShortConvolution(wide_k, config.conv_size)
            self.k_conv1d = ShortConvolution(wide_k // self.groups, config.conv_size)
            self.v_conv1d = ShortConvolution(wide_v // self.groups, config.conv_size)
        self.gk_proj = nn.Sequential(
            nn.Linear(width, config.gate_low_rank_dim, bias=False),
            nn.Linear(config.gate_low_rank_dim, wide_k // self.groups),
        )
        if config.use_output_gate:
            self.g_proj = nn.Linear(width, wide_v, bias=False)
        fused = config.use_output_gate and config.fuse_norm
        self.norm_name = "g_norm_swish_gate" if fused else "g_norm"
        setattr(
            self, self.norm_name, RMSNorm(self.value, config.norm_eps, config.elementwise_affine)
        )
        self.o_proj = nn.Linear(wide_v, width, bias=False)

    def start(self) -> None:
        """Fresh weights: the first head keeps some 2,000 to 50,000 tokens, the last 20 and up."""
        bias = self.gk_proj[1].bias
        count = bias.numel() // self.key
        slow = torch.linspace(5, 0, count) if count > 1 else torch.tensor([5.0])
        spread = torch.linspace(0, 3, self.key)
        with torch.no_grad():
            bias.copy_((slow[:, None] + spread).flatten())

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        x, state = hidden_states, context.state(self.layer)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if hasattr(self, "q_conv1d"):
            q, k, v = convolve(self, (q, k, v), state, context)
        g = F.logsigmoid(self.gk_proj(x)) / self.normalizer
        g = g if self.clamp_min is None else g.clamp_min(self.clamp_min)
        q, k, g, v = *(heads(s, self.key) for s in (q, k, g)), heads(v, self.value)
        q, k = self.feature_map(q), self.feature_map(k)
        k, g, v = (s.repeat_interleave(self.groups, 2) for s in (k, g, v))
        o, state["recurrent"] = chunk_gla(
            q=q,
            k=k,
            v=v,
            g=g,
            initial_state=state.get("recurrent"),
            output_final_state=context.cache is not None,
            valid=context.valid,
        )
        gate = heads(self.g_proj(x), self.value) if hasattr(self, "g_proj") else None
        return self.o_proj(getattr(self, self.norm_name)(o, gate).flatten(-2))


def tiny() -> dict:
    """The smallest configuration that the laws run on."""
    return {"hidden_size": 32, "num_heads": 2, "expand_k": 1.0, "use_short_conv": True}
