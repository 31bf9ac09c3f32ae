"""The block around a deep or windowed memory (arXiv 2501.00663, 4.4; 2505.23735, 5.1).

q, k, v go through short convolutions and SiLU, the memory normalises q and k, its read is normalised
a head and gated before the output projection. Parameter names are those of Gated DeltaNet where they
mean the same.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.errors import RetrofitError
from mcretrofit.models._blocks import RMSNorm, ShortConvolution, convolve, heads
from mcretrofit.models._state import Context

DEFAULTS = {
    "head_dim": 64,
    "num_heads": 4,
    "use_gate": True,
    "use_short_conv": True,
    "conv_size": 4,
    "output_gate_activation": "swish",
}
DEEP = {"inner_chunk": 16, "memory": "mlp", "expansion": 4}
MEMORIES = ("mlp", "linear")


class Projected(nn.Module):
    """Everything of a mixer but its memory."""

    def __init__(self, config, layer: int, expand_v: float = 1.0) -> None:  # noqa: ANN001
        super().__init__()
        self.layer, self.num_heads, self.key = layer, config.num_heads, config.head_dim
        self.value = int(config.head_dim * expand_v)
        self.where = f"model.layers.{layer}.attn"
        width, wide_k = config.hidden_size, config.num_heads * self.key
        wide_v = config.num_heads * self.value
        self.q_proj = nn.Linear(width, wide_k, bias=False)
        self.k_proj = nn.Linear(width, wide_k, bias=False)
        self.v_proj = nn.Linear(width, wide_v, bias=False)
        if config.use_short_conv:
            self.q_conv1d = ShortConvolution(wide_k, config.conv_size)
            self.k_conv1d = ShortConvolution(wide_k, config.conv_size)
            self.v_conv1d = ShortConvolution(wide_v, config.conv_size)
        if config.use_gate:
            self.g_proj = nn.Linear(width, wide_v, bias=False)
        self.o_norm = RMSNorm(self.value, config.norm_eps, True, config.output_gate_activation)
        self.o_proj = nn.Linear(wide_v, width, bias=False)

    def projected(self, x: Tensor, state: dict, context: Context) -> list[Tensor]:
        """q, k, v `[B, T, H, *]` after convolution and SiLU."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if hasattr(self, "q_conv1d"):
            q, k, v = convolve(self, (q, k, v), state, context)
        else:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        return [heads(q, self.key), heads(k, self.key), heads(v, self.value)]

    def mixed(self, x: Tensor, read: Tensor) -> Tensor:
        """The memory's read `[B, T, H, V]`, normalised, gated and projected: `[B, T, D]`."""
        gate = heads(self.g_proj(x), self.value) if hasattr(self, "g_proj") else None
        return self.o_proj(self.o_norm(read, gate).flatten(-2))


class Deep(Projected):
    """A mixer whose memory is a network: its M_0, the same for every segment, is learned."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__(config, layer)
        self.inner_chunk = config.inner_chunk
        if type(self.inner_chunk) is not int or self.inner_chunk < 1:
            raise RetrofitError(
                f"config: inner_chunk is {self.inner_chunk!r}, not a number of tokens"
            )
        if config.memory not in MEMORIES:
            raise RetrofitError(
                f"config: memory is {config.memory!r} (known: {', '.join(MEMORIES)})"
            )
        if config.max_step <= 0:
            raise RetrofitError(f"config: max_step is {config.max_step}, not above 0")
        self.max_step = config.max_step
        count, key = self.num_heads, self.key
        if config.memory == "linear":
            self.weight = nn.Parameter(torch.randn(count, key, key) * 0.1 * key**-0.5)
            return
        hidden = int(key * config.expansion)
        self.up = nn.Parameter(torch.randn(count, key, hidden) * key**-0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, key) * 0.1 * hidden**-0.5)

    def projected(self, x: Tensor, state: dict, context: Context) -> list[Tensor]:
        """As elsewhere, with values times `K^-1/2`: about as long as keys.

        Longer ones make steps of gradient descent unstable, and the norm of the read undoes scales.
        """
        q, k, v = super().projected(x, state, context)
        return [q, k, v * self.key**-0.5]

    @property
    def start_weights(self) -> tuple[Tensor, ...]:
        """M_0: `[H, K, E]` and `[H, E, K]`, or one matrix `[H, K, K]`."""
        return (self.weight,) if hasattr(self, "weight") else (self.up, self.down)


def gate(projection: nn.Linear, x: Tensor) -> Tensor:
    """Logits of a gate in float32."""
    logits = projection(x)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def spread_(bias: Tensor, fastest: float = 20.0, slowest: float = 5000.0) -> None:
    """Biases of keep gates whose time constants spread evenly in log, in tokens."""
    count = bias.numel()
    taus = torch.linspace(math.log(fastest), math.log(slowest), count)
    with torch.no_grad():
        bias.copy_(taus if count > 1 else torch.full_like(taus, math.log(slowest)))
