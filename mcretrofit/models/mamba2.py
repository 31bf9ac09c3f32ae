"""Mamba-2, in the layouts of transformers, FLA and state-spaces (arXiv 2405.21060)."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.errors import RetrofitError
from mcretrofit.models._blocks import RMSNorm, ShortConvolution, heads
from mcretrofit.models._mamba2_layout import from_layout as from_layout
from mcretrofit.models._state import Context
from mcretrofit.ops import mamba2
from mcretrofit.ops._call import call, entry

MODEL_TYPES = ("mamba2",)
ABOUT = {
    "memory": "linear",
    "layouts": ("transformers", "FLA", "state-spaces"),
    "parity": "transformers' own class, flash-linear-attention 0.6",
    "tested": "on the CPU, 1 and 2 groups, decoding; one group in Triton's interpreter",
}
DEFAULTS = {
    "head_dim": 64,
    "state_size": 128,
    "expand": 2,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "rmsnorm": True,
    "norm_before_gate": False,
    "D_has_hdim": False,
    "dt_limit": None,
    "norm_eps": 1e-5,
}
mamba2_chunk_scan = entry(mamba2, "mamba2_chunk_scan", partial(call, mamba2))


class GroupedNorm(nn.Module):
    """Root-mean-square norm over groups of channels, `silu(gate)` multiplied in before or after it."""

    def __init__(self, width: int, groups: int, eps: float, before_gate: bool) -> None:
        super().__init__()
        self.groups, self.eps, self.before_gate = groups, eps, before_gate
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide, gate = x.to(torch.promote_types(x.dtype, torch.float32)), F.silu(gate.to(x))
        wide = wide if self.before_gate else wide * gate
        wide = wide.unflatten(-1, (self.groups, -1))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        wide = wide.flatten(-2) * self.weight
        return wide * gate if self.before_gate else wide


class Mixer(nn.Module):
    """One projection to gate, inputs, keys (B), queries (C) and time steps; a skip past the memory."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__()
        if config.hidden_act not in ("swish", "silu"):
            raise RetrofitError(
                f"config: hidden_act {config.hidden_act!r} is not supported (swish is)"
            )
        self.layer, width = layer, config.hidden_size
        self.inner, self.value = int(config.expand * width), config.head_dim
        self.key, self.keys = config.state_size, config.n_groups * config.state_size
        self.count = self.inner // self.value
        self.dt_limit = tuple(config.dt_limit or (0.0, float("inf")))
        mixed = self.inner + 2 * self.keys
        self.in_proj = nn.Linear(width, self.inner + mixed + self.count, bias=config.use_bias)
        self.conv1d = ShortConvolution(mixed, config.conv_kernel, config.use_conv_bias)
        self.A_log = nn.Parameter(torch.zeros(self.count))
        self.dt_bias = nn.Parameter(torch.zeros(self.count))
        self.D = nn.Parameter(torch.ones(self.inner if config.D_has_hdim else self.count))
        if config.rmsnorm:
            norm = (config.n_groups, config.norm_eps, config.norm_before_gate)
            self.norm = GroupedNorm(self.inner, *norm)
        self.out_proj = nn.Linear(self.inner, width, bias=config.use_bias)

    def start(self) -> None:
        """Fresh weights: the heads' decays spread from less than one token to 1,000."""
        steps = torch.logspace(-3, -1, self.count)
        with torch.no_grad():
            self.A_log.copy_(torch.linspace(1, 16, self.count).log())
            self.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        state = context.state(self.layer)
        sizes = (self.inner, self.inner + 2 * self.keys, self.count)
        gate, x, dt = self.in_proj(hidden_states).split(sizes, -1)
        x, state["conv"] = self.conv1d(x, state.get("conv"), context)
        x, k, q = x.split((self.inner, self.keys, self.keys), -1)
        o, state["recurrent"] = mamba2_chunk_scan(
            heads(x, self.value),
            dt,
            -self.A_log.float().exp(),
            heads(k, self.key),
            heads(q, self.key),
            D=self.D if self.D.numel() == self.count else self.D.unflatten(0, (-1, self.value)),
            dt_bias=self.dt_bias,
            dt_softplus=True,
            dt_limit=self.dt_limit,
            initial_states=state.get("recurrent"),
            return_final_states=True,
            valid=context.valid,
        )
        o = o.flatten(-2)
        o = self.norm(o, gate) if hasattr(self, "norm") else o * F.silu(gate)
        return self.out_proj(o.to(hidden_states.dtype))


class Block(nn.Module):
    """Norm and mixer with their residual: there is no MLP."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = Mixer(config, layer)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return x + self.mixer(self.norm(x), context)


def tiny() -> dict:
    """The smallest configuration that the laws run on: two groups of keys."""
    return {"hidden_size": 32, "head_dim": 16, "state_size": 8, "n_groups": 2, "hidden_act": "silu"}
