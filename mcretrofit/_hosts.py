"""What a host publishes with a mixer's call: hidden states, padding, and where segments can ride.

Our decoder hands its `Context` over; transformers hands a cache object whose linear-attention layer
copies into fixed buffers, so a subclass of that layer carries the segments.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from mcretrofit.segments import SegmentCache

CACHES = ("past_key_values", "cache_params", "cache")


class Published:
    """One call's view of its host."""

    def __init__(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        given = {**arguments, **arguments.get("kwargs", {})}
        self.module, self.x = module, given["hidden_states"]
        context = given.get("context")
        if context is not None:
            self.holder: Any = context.state(module.layer)
            self.valid = context.valid
            return
        cache = next((given[n] for n in CACHES if given.get(n) is not None), None)
        self.holder = None if cache is None else _layer(cache, module.layer_idx)
        mask = given.get("attention_mask")
        valid = None if mask is None else mask[:, mask.shape[1] - self.x.shape[1] :].bool()
        self.valid = None if valid is None or bool(valid.all()) else valid

    def segments(self, start: Callable[[], SegmentCache]) -> SegmentCache:
        """The mixer's segments so far; a fresh, unkept cache where the host keeps nothing."""
        if self.holder is None:
            return start()
        kept = self.holder if isinstance(self.holder, dict) else vars(self.holder)
        if kept.get("segments") is None:
            kept["segments"] = start()
        return kept["segments"]


class Calls(threading.local):
    """The calls under way: one stack a thread, as copies of a model share the function."""

    def __init__(self) -> None:
        self.made: list[Published] = []


class _Segments:
    """Mixed over a cache layer's own class: the segments follow its batch."""

    segments: SegmentCache | None = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._rows(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._rows(lambda t: t[indices.to(t.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._rows(lambda t: t.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        super().reset()
        self.segments = None

    def _rows(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.segments is not None:
            self.segments.map_rows(function)


_classes: dict[type, type] = {}


def _layer(cache: Any, index: int) -> Any:
    """The cache's layer as one that carries segments, replaced in place the first time."""
    layer = cache.layers[index]
    if isinstance(layer, _Segments):
        return layer
    kind = type(layer)
    if kind not in _classes:
        _classes[kind] = type(f"Segmented{kind.__name__}", (_Segments, kind), {})
    carrying = _classes[kind].__new__(_classes[kind])
    vars(carrying).update(vars(layer))
    cache.layers[index] = carrying
    return carrying


def nothing(*_: Any, **__: Any) -> None:
    """In place of a kernel that would go past the op."""


def by_device(function: FunctionType) -> dict[str, Callable]:
    """Kernels that a host bound to a GPU package, made to take their torch body on a CPU."""
    bodies = {}
    for name in function.__code__.co_names:
        bound = function.__globals__.get(name)
        if inspect.isfunction(bound) and hasattr(bound, "__wrapped__"):
            bodies[name] = _chosen(bound, inspect.unwrap(bound))
    return bodies


def renamed(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """The function with other meanings for some of its module's names."""
    made = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def spare_(module: nn.Module) -> None:
    """Let a mixer that nothing is attached to choose by device too: it runs beside those that do."""
    function = inspect.unwrap(type(module).forward)
    bodies = by_device(function)
    if bodies:
        module.forward = MethodType(renamed(function, bodies), module)


def _chosen(kernel: Callable, body: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        first = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        return (kernel if first.is_cuda else body)(*args, **kwargs)

    return run
