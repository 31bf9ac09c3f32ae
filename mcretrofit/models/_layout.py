"""Where a model's tensors lie in a checkpoint that is not laid out like the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Part(NamedTuple):
    """One of the model's tensors: its stored name, its shape here, and how to get one there."""

    stored: str
    shape: tuple[int, ...]
    convert: Callable[[Tensor], Tensor] = lambda tensor: tensor


class Layout(NamedTuple):
    """A configuration in the family's own fields, and the model's tensor names -> parts."""

    config: dict[str, Any]
    parts: dict[str, Part]


def unfused(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Part]:
    """Every tensor as it lies; early FLA's `gate_proj`, gate and up in one tensor, as the two."""
    parts = {name: Part(name, tuple(shape)) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        up, down = (name.replace(".mlp.gate_proj.", f".mlp.{n}_proj.") for n in ("up", "down"))
        wide = shapes.get(down, ())[1:]
        if up == name or up in shapes or not wide or tuple(shape[:1]) != (2 * wide[0],):
            continue
        half = (wide[0], *shape[1:])
        parts[name] = Part(name, half, lambda tensor: tensor.chunk(2)[0])
        parts[up] = Part(name, half, lambda tensor: tensor.chunk(2)[1])
    return parts
