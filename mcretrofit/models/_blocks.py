"""The parts around a recurrence, in plain torch, with the parameter names of FLA-format checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.errors import RetrofitError
from mcretrofit.models._state import Context


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32 over the last dim; `gate` multiplies the result."""

    def __init__(
        self, width: int, eps: float, affine: bool = True, activation: str = "swish"
    ) -> None:
        super().__init__()
        self.eps, self.activation = eps, activation
        self.weight = nn.Parameter(torch.ones(width)) if affine else None

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        wide = wide if self.weight is None else wide * self.weight
        if gate is not None:
            wide = wide * (torch.sigmoid if self.activation == "sigmoid" else F.silu)(gate.to(wide))
        return wide.to(x.dtype)


class GatedMLP(nn.Module):
    """`down(silu(gate x) * up x)`."""

    def __init__(self, config) -> None:  # noqa: ANN001
        super().__init__()
        width, hidden = config.hidden_size, config.intermediate_size
        if hidden is None:
            hidden = int(width * (config.hidden_ratio or 4) * 2 / 3)
            hidden = 256 * -(-hidden // 256)
        if config.hidden_act not in ("swish", "silu"):
            raise RetrofitError(
                f"config: hidden_act {config.hidden_act!r} is not supported (swish is)"
            )
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over a few tokens; its state is the last inputs `[B, W - 1, D]`."""

    def __init__(
        self, width: int, kernel: int, bias: bool = False, activation: str | None = "silu"
    ) -> None:
        super().__init__()
        self.kernel, self.activation = kernel, activation
        self.weight = nn.Parameter(torch.empty(width, 1, kernel))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        nn.init.uniform_(self.weight, -(kernel**-0.5), kernel**-0.5)

    def forward(self, x: Tensor, past: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """`x [B, T, D]`, `past [B, W - 1, D]` or None -> the same shapes."""
        x = context.masked(x)
        if past is None:
            past = x.new_zeros(x.shape[0], self.kernel - 1, x.shape[-1])
        x = torch.cat([past.to(x.dtype), x], 1)
        length = x.shape[1] - self.kernel + 1
        y = sum(x[:, i : i + length] * self.weight[:, 0, i] for i in range(self.kernel))
        y = y if self.bias is None else y + self.bias
        return F.silu(y) if self.activation else y, context.tail(x, self.kernel - 1)


def convolve(
    mixer: nn.Module, streams: tuple[Tensor, ...], state: dict, context: Context
) -> list[Tensor]:
    """q, k, v through `mixer.{q,k,v}_conv1d`, with their tails kept in `state["conv"]`."""
    past = state.get("conv") or (None,) * len(streams)
    convs = (mixer.q_conv1d, mixer.k_conv1d, mixer.v_conv1d)
    done = [c(x, p, context) for c, x, p in zip(convs, streams, past, strict=True)]
    state["conv"] = tuple(tail for _, tail in done)
    return [y for y, _ in done]


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary embedding over halves, `x [B, T, H, D]`, computed here: buffers do not survive meta."""
    half = x.shape[-1] // 2
    steps = torch.arange(0, half, dtype=torch.float32, device=x.device) / half
    angle = positions[..., None, None].float() * base**-steps
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def heads(x: Tensor, width: int) -> Tensor:
    """`[B, T, H * D]` -> `[B, T, H, D]`."""
    return x.unflatten(-1, (-1, width))


def whole(config, factor: float, what: str) -> int:  # noqa: ANN001
    """`hidden_size * factor`, which has to be an integer."""
    product = config.hidden_size * factor
    if abs(product - round(product)) > 1e-6 * product:
        raise RetrofitError(f"config: hidden_size * {what} is {product}, not an integer")
    return round(product)
