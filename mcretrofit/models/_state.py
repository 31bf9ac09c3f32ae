"""What travels through a forward (`Context`) and between forwards (`RecurrentCache`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


def map_rows(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`function` over every batch-first tensor inside a layer's state."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: map_rows(v, function) for name, v in value.items()}
    if isinstance(value, tuple):
        return tuple(map_rows(v, function) for v in value)
    return value.map_rows(function) if hasattr(value, "map_rows") else value


class RecurrentCache(Cache):
    """One dict of batch-first tensors a layer: recurrent state, convolution tails, cached segments."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: dict[int, dict[str, Any]] = {}
        self.seen: Tensor | None = None  # [B], valid tokens of each row so far

    def state(self, layer: int) -> dict[str, Any]:
        return self.states.setdefault(layer, {})

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.seen is None else int(self.seen.max())

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def _rows(self, function: Callable[[Tensor], Tensor]) -> None:
        self.states = map_rows(self.states, function)
        self.seen = None if self.seen is None else function(self.seen)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._rows(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._rows(lambda t: t[indices.to(t.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._rows(lambda t: t.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        self.states, self.seen = {}, None

    def crop(self, max_length: int) -> None:
        raise ValueError("a recurrent state cannot be cropped (assisted decoding needs that)")


@dataclass
class Context:
    """One forward's view: `valid [B, T]` (None: no padding), `positions [B or 1, T]`, the cache."""

    valid: Tensor | None
    positions: Tensor
    cache: RecurrentCache | None
    shared: dict[str, Tensor] = field(default_factory=dict)  # from layer to layer (rwkv7's v_first)

    def state(self, layer: int) -> dict[str, Any]:
        """The layer's state, an empty throwaway where nothing is kept."""
        return {} if self.cache is None else self.cache.state(layer)

    def masked(self, x: Tensor) -> Tensor:
        """`x [B, T, D]` with padding set to zero."""
        return x if self.valid is None else x * self.valid[..., None].to(x.dtype)

    def tail(self, x: Tensor, width: int) -> Tensor:
        """The last `width` valid columns of `x [B, T, D]` (x starts with `width` earlier ones)."""
        if self.valid is None:
            return x[:, x.shape[1] - width :].clone()
        last = (self.valid * torch.arange(1, self.valid.shape[1] + 1, device=x.device)).amax(1)
        columns = last[:, None] + torch.arange(width, device=x.device)
        return x.gather(1, columns[..., None].expand(-1, -1, x.shape[-1]))
