"""The parts that RWKV families share (arXiv 2404.05892, 2503.14456), with FLA's parameter names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.errors import RetrofitError
from mcretrofit.models._state import Context


class LowRank(nn.Module):
    """`W2 activation(W1 x) + b`."""

    def __init__(
        self, width: int, out: int, rank: int, activation: nn.Module, bias: bool = True
    ) -> None:
        super().__init__()
        first = nn.Linear(width, rank, bias=False)
        self.lora = nn.Sequential(first, activation, nn.Linear(rank, out, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.lora(x)


class HeadNorm(nn.Module):
    """Layer norm of each head in float32, then one affine map: `[B, T, H, V] -> [B, T, H V]`."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = F.layer_norm(wide, x.shape[-1:], eps=self.eps).flatten(-2)
        return (wide * self.weight + self.bias).to(x.dtype)


class Lerp(nn.Module):
    """`W (x + change * mu)`: a token mixed with the one before it, channel by channel."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out, bias=False)
        self.mu = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, change: Tensor) -> Tensor:
        return self.linear(x + change * self.mu)


class FeedForward(nn.Module):
    """`sigmoid(R x') * V relu(K x'')^2`, the feed-forward of RWKV-5 and 6."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__()
        self.layer, width, hidden = layer, config.hidden_size, config.intermediate_size
        if config.hidden_act != "sqrelu":
            raise RetrofitError(
                f"config: hidden_act {config.hidden_act!r} is not supported (sqrelu is)"
            )
        hidden = hidden or 32 * -(-int(width * (config.hidden_ratio or 3.5)) // 32)
        self.key, self.receptance = Lerp(width, hidden), Lerp(width, width)
        self.value = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        state = context.state(self.layer)
        x, change, state["ffn"] = shift(x, state.get("ffn"), context)
        value = self.value(F.relu(self.key(x, change)).square())
        return self.receptance(x, change).sigmoid() * value


class Block(nn.Module):
    """Layer norm, mixer, layer norm, feed-forward; one more norm before the first layer."""

    def __init__(self, config, layer: int, mixer: nn.Module, forward: nn.Module) -> None:  # noqa: ANN001
        super().__init__()
        if config.norm_first and layer == 0:
            self.pre_norm = final_norm(config)
        self.attn_norm, self.attn = final_norm(config), mixer
        self.ffn_norm, self.ffn = final_norm(config), forward

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = self.pre_norm(x) if hasattr(self, "pre_norm") else x
        x = x + self.attn(self.attn_norm(x), context)
        return x + self.ffn(self.ffn_norm(x), context)


def final_norm(config) -> nn.LayerNorm:  # noqa: ANN001
    """The layer norm that this family has everywhere."""
    return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)


def shift(x: Tensor, past: Tensor | None, context: Context) -> tuple[Tensor, Tensor, Tensor]:
    """`x [B, T, D]` without padding, its step from the token before, the last token `[B, 1, D]`."""
    x = context.masked(x)
    past = x.new_zeros(x.shape[0], 1, x.shape[-1]) if past is None else past.to(x.dtype)
    joined = torch.cat([past, x], 1)
    return x, joined[:, :-1] - x, context.tail(joined, 1)
