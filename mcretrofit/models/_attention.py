"""Softmax attention in the layers that a config's `attn` lists (FLA format): hybrids keep them as is.

With every layer listed the model is a plain transformer; with every other one and a `window_size` it is
a hybrid like Samba (arXiv 2406.07522). Caching never wraps them: their keys and values are the cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.errors import RetrofitError, UsageError, unknown
from mcretrofit.models._blocks import RMSNorm, ShortConvolution, convolve, heads, rotate
from mcretrofit.models._state import Context


class Fields(NamedTuple):
    """The keys of `attn`; `window_size` counts the token itself, None sees everything.

    `conv_size` is ours: short convolutions as before a recurrence, in a block that is else the same.
    """

    layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    window_size: int | None = None
    rope_theta: float | None = 10000.0
    conv_size: int | None = None


def fields(config: Any) -> Fields | None:
    """`attn` of a config, None where all layers are the family's own; raises naming what is wrong."""
    given = getattr(config, "attn", None)
    if not given:
        return None
    strange = [name for name in given if name not in Fields._fields]
    if strange:
        raise UsageError(f"config: attn: {unknown('key', strange[0], Fields._fields)}")
    missing = [name for name in ("layers", "num_heads") if name not in given]
    if missing:
        raise UsageError(f"config: attn: missing {', '.join(missing)}")
    made = Fields(**given)
    count, width = config.num_hidden_layers, config.hidden_size
    far = [layer for layer in made.layers if not 0 <= layer < count]
    if far:
        raise RetrofitError(f"config: attn: there is no layer {far[0]} of {count}")
    if width % made.num_heads or made.num_heads % (made.num_kv_heads or made.num_heads):
        raise RetrofitError(
            f"config: attn: {made.num_heads} heads fit neither {width} channels nor their keys"
        )
    if made.window_size is not None and made.window_size < 1:
        raise RetrofitError(f"config: attn: window_size is {made.window_size}, not above 0")
    return made


class Attention(nn.Module):
    """Rotary softmax attention; its state is keys, values and positions, of a window only its last."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        said = fields(config)
        self.layer, self.window, self.theta = layer, said.window_size, said.rope_theta
        self.num_heads, self.kv_heads = said.num_heads, said.num_kv_heads or said.num_heads
        self.width = config.hidden_size // said.num_heads
        narrow = self.kv_heads * self.width
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=said.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=said.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=said.qkv_bias)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        if said.conv_size is not None:
            self.q_conv1d = ShortConvolution(config.hidden_size, said.conv_size)
            self.k_conv1d = ShortConvolution(narrow, said.conv_size)
            self.v_conv1d = ShortConvolution(narrow, said.conv_size)
        if said.qk_norm:
            self.q_norm = RMSNorm(self.width, 1e-5)
            self.k_norm = RMSNorm(self.width, 1e-5)

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        x = hidden_states
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if hasattr(self, "q_conv1d"):
            q, k, v = convolve(self, (q, k, v), context.state(self.layer), context)
        q, k = heads(q, self.width), heads(k, self.width)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        at = context.positions.expand(len(x), -1)
        if self.theta is not None:
            q, k = rotate(q, at, self.theta), rotate(k, at, self.theta)
        # padding stands at -1, where nobody looks
        kept = at if context.valid is None else at.masked_fill(~context.valid, -1)
        k, v, kept = self._remembered(k.flatten(-2), v, kept, context)
        k, v = (heads(s, self.width) for s in (k, v))
        k, v = (s.repeat_interleave(self.num_heads // self.kv_heads, 2) for s in (k, v))
        seen = None if self._plain(context, k.shape[1]) else self._seen(at, kept)[:, None]
        read = F.scaled_dot_product_attention(
            *(s.transpose(1, 2) for s in (q, k, v)), attn_mask=seen, is_causal=seen is None
        )
        return self.o_proj(read.transpose(1, 2).flatten(-2))

    def _remembered(
        self, k: Tensor, v: Tensor, at: Tensor, context: Context
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values `[B, S, *]` and positions `[B, S]` with what earlier calls left."""
        if context.cache is None:
            return k, v, at
        state, width = context.state(self.layer), (self.window or 1) - 1
        past = state.get("attention")
        if past is None:
            past = (k.new_zeros(len(k), width, k.shape[-1]),) * 2
            past += (at.new_full((len(k), width), -1),)
        k, v, at = (torch.cat([p, n], 1) for p, n in zip(past, (k, v, at), strict=True))
        state["attention"] = (k, v, at)
        if self.window is not None:
            tails = (context.tail(s, width) for s in (k, v, at[..., None]))
            state["attention"] = (next(tails), next(tails), next(tails)[..., 0])
        return k, v, at

    def _plain(self, context: Context, length: int) -> bool:
        """Whether nothing but the order of tokens decides what is seen."""
        whole = self.window is None or self.window >= length
        return whole and context.valid is None and length == context.positions.shape[1]

    def _seen(self, at: Tensor, kept: Tensor) -> Tensor:
        """Which of the kept tokens `[B, S]` each of `at [B, T]` looks at: `[B, T, S]`."""
        away = at[..., None] - kept[:, None]
        seen = (away >= 0) & (kept >= 0)[:, None]
        if self.window is not None:
            seen &= away < self.window
        # padding itself sees nothing, and a softmax of nothing is no number: it looks at its own place
        length = at.shape[1]
        own = torch.eye(length, dtype=torch.bool, device=at.device)
        alone = ~seen.any(-1, keepdim=True)
        return torch.cat([seen[..., :-length], seen[..., -length:] | own & alone], -1)
