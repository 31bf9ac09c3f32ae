"""RWKV-5.2 in BlinkDL's names: each mix is kept as the share of the token before."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mcretrofit.models import _blinkdl as blinkdl
from mcretrofit.models._layout import Layout

VERSION = "RWKV-5.2"


def _rest(mix: Tensor) -> Tensor:
    """The share of a token itself `[1, 1, D]` -> that of the one before it `[D]`."""
    return 1 - mix.reshape(-1)


TABLE = {
    **blinkdl.BLOCK,
    **{f"att.time_mix_{s}": (f"attn.{s}_proj.mu", _rest) for s in "rkvg"},
    "att.time_decay": ("attn.decay", blinkdl.same),
    "ffn.time_mix_k": ("ffn.key.mu", _rest),
    "ffn.time_mix_r": ("ffn.receptance.mu", _rest),
}


def from_layout(shapes: blinkdl.Shapes, config: dict[str, Any]) -> Layout | None:
    """BlinkDL's tensors as this family's; None for others, its older versions among them."""
    decay = shapes.get("blocks.0.att.time_decay", ())
    if len(decay) != 2 or decay[1] == 1 or "blocks.0.att.gate.weight" not in shapes:
        return None
    found = {**blinkdl.sizes(shapes, VERSION), **config}
    return Layout(found, blinkdl.parts(shapes, TABLE, VERSION))
