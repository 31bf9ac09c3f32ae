"""RWKV-6 laid out otherwise: BlinkDL's own names, and FLA's with all mixes in one tensor."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from mcretrofit.models import _blinkdl as blinkdl
from mcretrofit.models._layout import Layout, Part

VERSION = "RWKV-6"
STREAMS = "rwkvg"  # FLA's order of the mixed inputs
_FROM = ["wkvrg".index(stream) for stream in STREAMS]  # where BlinkDL's has them


def _first(stored: Tensor) -> Tensor:
    """`[D, 5 r]` -> `[5 r, D]`, the five in FLA's order."""
    return stored.mT.unflatten(0, (5, -1))[_FROM].flatten(0, 1)


def _second(stored: Tensor) -> Tensor:
    """`[5, r, D]` -> `[D, 5 r]`, the five in FLA's order."""
    return stored[_FROM].permute(2, 0, 1).flatten(1)


TABLE = {
    **blinkdl.BLOCK,
    **{f"att.time_maa_{s}": (f"attn.x_{s}", blinkdl.flat) for s in STREAMS},
    "att.time_maa_x": ("attn.x_proj.0.mu", blinkdl.flat),
    "att.time_maa_w1": ("attn.x_proj.0.linear.weight", _first),
    "att.time_maa_w2": ("attn.x_proj.2.weight", _second),
    "att.time_decay": ("attn.w_proj.linear.lora.2.bias", blinkdl.flat),
    "att.time_decay_w1": ("attn.w_proj.linear.lora.0.weight", blinkdl.turned),
    "att.time_decay_w2": ("attn.w_proj.linear.lora.2.weight", blinkdl.turned),
    "ffn.time_maa_k": ("ffn.key.mu", blinkdl.flat),
    "ffn.time_maa_r": ("ffn.receptance.mu", blinkdl.flat),
}


def from_layout(shapes: blinkdl.Shapes, config: dict[str, Any]) -> Layout | None:
    """BlinkDL's tensors, or FLA's `attn.x_bias [5, D]`, as this family's; None for others."""
    if "blocks.0.att.time_maa_w1" in shapes:
        found = {**blinkdl.sizes(shapes, VERSION), "expand_k": 1.0, "expand_v": 1.0}
        found["proj_low_rank_dim"] = shapes["blocks.0.att.time_maa_w1"][1] // 5
        found["gate_low_rank_dim"] = shapes.get("blocks.0.att.time_decay_w1", (0, 0))[1]
        return Layout({**found, **config}, blinkdl.parts(shapes, TABLE, VERSION))
    if any(name.endswith(".attn.x_bias") for name in shapes):
        return Layout(config, _unstacked(shapes))
    return None


def _unstacked(shapes: blinkdl.Shapes) -> dict[str, Part]:
    parts = {name: Part(name, tuple(shape)) for name, shape in shapes.items()}
    for name in [n for n in parts if n.endswith(".attn.x_bias")]:
        width = parts.pop(name).shape[-1]
        for row, stream in enumerate(STREAMS):
            to = f"{name.removesuffix('bias')}{stream}"
            parts[to] = Part(name, (width,), partial(_row, row))
    return parts


def _row(row: int, stacked: Tensor) -> Tensor:
    return stacked[row]
