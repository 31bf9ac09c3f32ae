"""Where a model's tensors lie in a checkpoint that is not laid out like the model."""

from __future__ import annotations

from collections.abc import Callable
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
