"""Comba, FLA format (arXiv 2506.02475)."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.models._blocks import RMSNorm, ShortConvolution, convolve, heads
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


class Mixer(nn.Module):
    """q, k, v through short convolutions, a weaker key that recalls, a gated norm on the read."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__()
        self.layer, self.key = layer, config.head_dim
        self.value = int(config.head_dim * config.expand_v)
        width, n_k = config.hidden_size, config.num_heads
        n_v = config.num_v_heads or n_k
        self.q_proj = nn.Linear(width, n_k * self.key, bias=False)
        self.k_proj = nn.Linear(width, n_k * self.key, bias=False)
        self.v_proj = nn.Linear(width, n_v * self.value, bias=False)
        self.a_proj = nn.Linear(width, n_v, bias=False)
        self.b_proj = nn.Linear(width, n_v, bias=False)
        self.decay, self.D = nn.Parameter(torch.ones(n_k)), nn.Parameter(torch.ones(n_k))
        self.A_log = nn.Parameter(torch.zeros(n_v))
        self.dt_bias = nn.Parameter(torch.zeros(n_v))
        if config.use_short_conv:
            self.q_conv1d = ShortConvolution(n_k * self.key, config.conv_size)
            self.k_conv1d = ShortConvolution(n_k * self.key, config.conv_size)
            self.v_conv1d = ShortConvolution(n_v * self.value, config.conv_size)
        if config.use_output_gate:
            self.g_proj = nn.Linear(width, n_v * self.value, bias=False)
        self.o_norm = RMSNorm(self.value, config.norm_eps, True, "sigmoid")
        self.o_proj = nn.Linear(n_v * self.value, width, bias=False)

    def start(self) -> None:
        """Fresh weights: the heads' decays spread from some 20 to 5,000 tokens."""
        count = self.dt_bias.numel()
        steps = torch.logspace(-1.3, -3.7, count) if count > 1 else torch.tensor([1e-3])
        with torch.no_grad():
            self.A_log.zero_()
            self.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        x, state = hidden_states, context.state(self.layer)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if hasattr(self, "q_conv1d"):
            q, k, v = convolve(self, (q, k, v), state, context)
        else:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        q, k = heads(q, self.key), heads(k, self.key)
        p = k * self.decay.sigmoid()[:, None]
        steps = F.softplus(self.a_proj(x).float() + self.dt_bias)
        o, state["recurrent"] = chunk_comba(
            q=q - self.D[:, None] * p,
            k=k,
            v=heads(v, self.value),
            p=p,
            g=-self.A_log.float().exp() * steps,
            beta=self.b_proj(x).sigmoid(),
            use_qk_l2norm_in_kernel=True,
            initial_state=state.get("recurrent"),
            output_final_state=context.cache is not None,
            valid=context.valid,
        )
        gate = heads(self.g_proj(x), self.value) if hasattr(self, "g_proj") else None
        return self.o_proj(self.o_norm(o, gate).flatten(-2))


def tiny() -> dict:
    """The smallest configuration that the laws run on: grouped values."""
    return {"hidden_size": 32, "head_dim": 16, "num_heads": 1, "num_v_heads": 2, "expand_v": 1.0}
