"""RWKV-7 laid out otherwise: BlinkDL's own names, and the first version of the FLA format."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from torch import Tensor

from mcretrofit.models import _rwkv7_keys as keys
from mcretrofit.models._layout import Layout, Part

_BLINKDL = re.compile(r"blocks\.\d+\.(att|ffn|ln\d)\.|(rwkv|rosa)\d+\.")


def from_layout(shapes: keys.Shapes, config: dict[str, Any]) -> Layout | None:
    """BlinkDL's tensors, or mixes in one (`attn.x_x [6, D]`), as this family's; None for others.

    Raises RetrofitError for BlinkDL's layouts of other models, naming the one found.
    """
    if any(_BLINKDL.match(name) for name in shapes):
        # BlinkDL normalises its removal keys as the unfused form of the format does
        found = {**config, **keys.infer(shapes), "fuse_norm": False}
        return Layout(found, dict(_turned(n, shapes) for n in shapes if not keys.unused(n)))
    if any(name.endswith(".attn.x_x") for name in shapes):
        return Layout(config, _unstacked(shapes))
    return None


def _turned(name: str, shapes: keys.Shapes) -> tuple[str, Part]:
    shape = keys.fla_shape(name, tuple(shapes[name]))
    return keys.to_fla(name), Part(name, shape, partial(keys.tensor_to_fla, name))


def _unstacked(shapes: keys.Shapes) -> dict[str, Part]:
    parts = {name: Part(name, tuple(shape)) for name, shape in shapes.items()}
    for name in [n for n in parts if n.endswith(".attn.x_x")]:
        width = parts.pop(name).shape[-1]
        for row, stream in enumerate("rwkvag"):
            parts[f"{name[:-1]}{stream}"] = Part(name, (1, 1, width), partial(_row, row))
    return parts


def _row(row: int, stacked: Tensor) -> Tensor:
    return stacked[row].reshape(1, 1, -1)
