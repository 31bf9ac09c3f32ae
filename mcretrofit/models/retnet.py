"""Retentive network, FLA format (arXiv 2307.08621)."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from mcretrofit.models._blocks import RMSNorm, heads, rotate, whole
from mcretrofit.models._feature_maps import activation
from mcretrofit.models._state import Context
from mcretrofit.ops import retention
from mcretrofit.ops._call import call

MODEL_TYPES = ("retnet",)
ABOUT = {
    "memory": "linear",
    "layouts": ("FLA",),
    "parity": "flash-linear-attention 0.6",
    "tested": "its kernels in Triton's interpreter: prefill and a decoded step",
}
# no use_short_conv: the format's blocks do not hand it on, so no checkpoint has the convolutions
DEFAULTS = {
    "hidden_ratio": 2,
    "expand_k": 1.0,
    "expand_v": 2.0,
    "num_heads": 8,
    "num_kv_heads": None,
    "feature_map": None,
    "use_output_gate": True,
    "elementwise_affine": True,
    "fuse_norm": True,
}
chunk_retention = partial(call, retention)


class Mixer(nn.Module):
    """Rotated q and k, v, one fixed decay a head, a gated norm on the read."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__()
        self.layer, self.feature_map = layer, activation(config.feature_map)
        self.groups = config.num_heads // (config.num_kv_heads or config.num_heads)
        width, wide_k = config.hidden_size, whole(config, config.expand_k, "expand_k")
        wide_v = whole(config, config.expand_v, "expand_v")
        self.key, self.value = wide_k // config.num_heads, wide_v // config.num_heads
        self.q_proj = nn.Linear(width, wide_k, bias=False)
        self.k_proj = nn.Linear(width, wide_k // self.groups, bias=False)
        self.v_proj = nn.Linear(width, wide_v // self.groups, bias=False)
        if config.use_output_gate:
            self.g_proj = nn.Linear(width, wide_v, bias=False)
        fused = config.use_output_gate and config.fuse_norm
        self.norm_name = "g_norm_swish_gate" if fused else "g_norm"
        setattr(
            self, self.norm_name, RMSNorm(self.value, config.norm_eps, config.elementwise_affine)
        )
        self.o_proj = nn.Linear(wide_v, width, bias=False)

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        x, state = hidden_states, context.state(self.layer)
        q = rotate(self.feature_map(heads(self.q_proj(x), self.key)), context.positions)
        k = rotate(self.feature_map(heads(self.k_proj(x), self.key)), context.positions)
        v = heads(self.v_proj(x), self.value)
        k, v = (s.repeat_interleave(self.groups, 2) for s in (k, v))
        o, state["recurrent"] = chunk_retention(
            q=q,
            k=k,
            v=v,
            initial_state=state.get("recurrent"),
            output_final_state=context.cache is not None,
            valid=context.valid,
        )
        gate = heads(self.g_proj(x), self.value) if hasattr(self, "g_proj") else None
        return self.o_proj(getattr(self, self.norm_name)(o, gate).flatten(-2))


def tiny() -> dict:
    """The smallest configuration that the laws run on: grouped keys and values."""
    return {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "expand_v": 1.0}
