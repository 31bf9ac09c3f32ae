"""DeltaNet, FLA format (arXiv 2406.06484)."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.errors import unknown
from mcretrofit.models._blocks import RMSNorm, ShortConvolution, convolve, heads, whole
from mcretrofit.models._feature_maps import elu_plus_one, identity
from mcretrofit.models._state import Context
from mcretrofit.ops import delta_rule
from mcretrofit.ops._call import call

MODEL_TYPES = ("delta_net",)
ABOUT = {
    "memory": "delta",
    "layouts": ("FLA",),
    "parity": "flash-linear-attention 0.6",
    "tested": "its kernels in Triton's interpreter: prefill and a decoded step",
}
DEFAULTS = {
    "expand_k": 1.0,
    "expand_v": 1.0,
    "num_heads": 16,
    "use_gate": False,
    "use_beta": True,
    "use_short_conv": True,
    "conv_size": 4,
    "allow_neg_eigval": False,
    "qk_norm": "l2",
    "qk_activation": "silu",
}
ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "elu": elu_plus_one, "identity": identity}
NORMS = ("l2", "sum")
chunk_delta_rule = partial(call, delta_rule)


class Mixer(nn.Module):
    """q, k, v through short convolutions, a writing strength a head, a norm on the read."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__()
        self.layer, self.strength = layer, 2.0 if config.allow_neg_eigval else 1.0
        self.qk_norm, self.activation = config.qk_norm, config.qk_activation
        if self.activation not in ACTIVATIONS:
            raise unknown("qk_activation", self.activation, ACTIVATIONS)
        if self.qk_norm not in NORMS:
            raise unknown("qk_norm", self.qk_norm, NORMS)
        width, wide_k = config.hidden_size, whole(config, config.expand_k, "expand_k")
        wide_v = whole(config, config.expand_v, "expand_v")
        self.key, self.value = wide_k // config.num_heads, wide_v // config.num_heads
        self.q_proj = nn.Linear(width, wide_k, bias=False)
        self.k_proj = nn.Linear(width, wide_k, bias=False)
        self.v_proj = nn.Linear(width, wide_v, bias=False)
        if config.use_beta:
            self.b_proj = nn.Linear(width, config.num_heads, bias=False)
        if config.use_short_conv:
            act = "silu" if self.activation == "silu" else None
            self.q_conv1d = ShortConvolution(wide_k, config.conv_size, activation=act)
            self.k_conv1d = ShortConvolution(wide_k, config.conv_size, activation=act)
            self.v_conv1d = ShortConvolution(wide_v, config.conv_size)
        if config.use_gate:
            self.g_proj = nn.Linear(width, wide_v, bias=False)
        self.o_norm = RMSNorm(self.value, config.norm_eps)
        self.o_proj = nn.Linear(wide_v, width, bias=False)

    def _streams(self, x: Tensor, state: dict, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        act = ACTIVATIONS[self.activation]
        if hasattr(self, "q_conv1d"):
            q, k, v = convolve(self, (q, k, v), state, context)
            act = identity if self.activation == "silu" else act
        else:
            v = F.silu(v)
        q, k = heads(act(q), self.key), heads(act(k), self.key)
        if self.qk_norm == "sum":
            q, k = (F.normalize(s, p=1, dim=-1, eps=1e-6) for s in (q, k))
        return q, k, heads(v, self.value)

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        x, state = hidden_states, context.state(self.layer)
        q, k, v = self._streams(x, state, context)
        beta = self.b_proj(x).sigmoid() if hasattr(self, "b_proj") else q.new_ones(q.shape[:3])
        o, state["recurrent"] = chunk_delta_rule(
            q=q,
            k=k,
            v=v,
            beta=beta * self.strength,
            use_qk_l2norm_in_kernel=self.qk_norm == "l2",
            initial_state=state.get("recurrent"),
            output_final_state=context.cache is not None,
            valid=context.valid,
        )
        gate = heads(self.g_proj(x), self.value) if hasattr(self, "g_proj") else None
        return self.o_proj(self.o_norm(o, gate).flatten(-2))


def tiny() -> dict:
    """The smallest configuration that the laws run on."""
    return {"hidden_size": 32, "num_heads": 2, "use_gate": True}
