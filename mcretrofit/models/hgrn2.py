"""HGRN2, FLA format (arXiv 2404.07904): what a forget gate lets go is what its key writes."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.models._blocks import RMSNorm, ShortConvolution, heads
from mcretrofit.models._state import Context
from mcretrofit.ops import gla
from mcretrofit.ops._call import call

MODEL_TYPES = ("hgrn2",)
ABOUT = {
    "memory": "linear",
    "layouts": ("FLA",),
    "parity": "flash-linear-attention 0.6",
    "tested": "its kernels in Triton's interpreter: prefill and a decoded step",
}
DEFAULTS = {
    "num_heads": None,
    "expand_ratio": 128,
    "use_short_conv": False,
    "conv_size": 4,
    "use_lower_bound": True,
    "elementwise_affine": True,
}
READ_EPS = 1e-5  # the format's norm of the read keeps this one, whatever norm_eps is
chunk_gla = partial(call, gla)


def shared(config) -> dict[str, nn.Parameter]:  # noqa: ANN001
    """Lower bounds of the forget gates, one row a layer, that grow with depth."""
    if not config.use_lower_bound:
        return {}
    return {"lower_bounds": nn.Parameter(torch.zeros(config.num_hidden_layers, config.hidden_size))}


class Mixer(nn.Module):
    """A query, an input and a bounded forget gate whose complement is the key."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__()
        self.layer, width = layer, config.hidden_size
        count = width // config.expand_ratio if config.expand_ratio else config.num_heads
        self.key = config.expand_ratio or width // count
        self.value, wide = width // count, count * self.key
        self.q_proj = nn.Linear(width, wide, bias=False)
        self.f_proj = nn.Linear(width, wide, bias=False)
        self.i_proj = nn.Linear(width, width, bias=False)
        if config.use_short_conv:
            for stream, out in zip("qfi", (wide, wide, width), strict=True):
                conv = ShortConvolution(out, config.conv_size, activation=None)
                setattr(self, f"{stream}_conv1d", conv)
        self.g_norm = RMSNorm(width, READ_EPS, config.elementwise_affine)
        self.o_proj = nn.Linear(width, width, bias=False)

    def _streams(self, x: Tensor, state: dict, context: Context) -> list[Tensor]:
        streams = [self.q_proj(x), self.f_proj(x), self.i_proj(x)]
        if not hasattr(self, "q_conv1d"):
            return streams
        past = state.get("conv") or (None, None, None)
        convs = (self.q_conv1d, self.f_conv1d, self.i_conv1d)
        done = [c(s, p, context) for c, s, p in zip(convs, streams, past, strict=True)]
        state["conv"] = tuple(tail for _, tail in done)
        return [y for y, _ in done]

    def _gate(self, f: Tensor, bounds: Tensor | None) -> Tensor:
        """Log decays `[B, T, H K]`; the first layer has no lower bound."""
        g = F.logsigmoid(f.to(torch.promote_types(f.dtype, torch.float32)))
        if bounds is None or self.layer == 0:
            return g
        shares = bounds.softmax(0, dtype=g.dtype)
        bound = shares[1 : self.layer + 1].sum(0)
        return torch.logaddexp(bound.log(), torch.log1p(-bound) + g)

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        state = context.state(self.layer)
        q, f, i = self._streams(hidden_states, state, context)
        g = self._gate(f, context.shared.get("lower_bounds"))
        k = (-torch.expm1(g)).to(i.dtype)
        o, state["recurrent"] = chunk_gla(
            q=heads(F.silu(q), self.key),
            k=heads(k, self.key),
            v=heads(i, self.value),
            g=heads(g, self.key),
            initial_state=state.get("recurrent"),
            output_final_state=context.cache is not None,
            valid=context.valid,
        )
        return self.o_proj(self.g_norm(o.flatten(-2)))


def tiny() -> dict:
    """The smallest configuration that the laws run on."""
    return {"hidden_size": 32, "expand_ratio": 16}
