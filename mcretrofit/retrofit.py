"""Attach caching to a live model's mixers, and take it off: the only file that rebinds a forward.

A mixer is any module whose forward calls one of `ops/*.NAMES`. Its forward function is rebuilt, for
this instance alone, with a private globals dict in which those names are ours: nothing is copied,
renamed or patched globally, so base keys stay as they are and the extras are exactly `*.mc.*`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mcretrofit._hosts import Calls, Published, by_device, nothing, renamed
from mcretrofit.caching import cached_scan
from mcretrofit.config import CachingConfig
from mcretrofit.errors import RetrofitError, named
from mcretrofit.gates import Gate
from mcretrofit.memories import Streams
from mcretrofit.memories._scan import refusal, sizes
from mcretrofit.ops._call import call, entry, from_state, silence, to_state
from mcretrofit.plan import Plan
from mcretrofit.registry import load, names


class Found(NamedTuple):
    """A mixer of a model and the op that it calls."""

    name: str
    module: nn.Module
    op: ModuleType
    calls: tuple[str, ...]


class Cover(NamedTuple):
    """What is cached of one mixer: its heads of `total`, and the gate's statistics for them."""

    heads: list[int]
    total: int
    mask: Tensor  # [H', K]
    mean: Tensor | None = None  # [H']
    std: Tensor | None = None  # [H']
    whiten: Tensor | None = None  # [H', K, K]
    # settings of `CachingConfig` by cached head, where they are not all the configuration's
    each: dict[str, list] | None = None


@cache
def _ops() -> dict[str, ModuleType]:
    modules = [load("ops", name) for name in names("ops")]
    return {name: op for op in modules for name in op.NAMES}


def mixers(model: nn.Module) -> list[Found]:
    """Every recurrent mixer of a model, in order."""
    found = []
    for name, module in model.named_modules():
        used = inspect.unwrap(type(module).forward).__code__.co_names
        called = tuple(n for n in used if n in _ops())
        if called:
            found.append(Found(name, module, _ops()[called[0]], called))
    return found


def retrofit_(model: nn.Module, config: CachingConfig, covers: Mapping[str, Cover]) -> list[str]:
    """Attach caching in place to the mixers named in `covers`; returns the names that were wrapped.

    Raises `RetrofitError` where the model has no recurrent mixer or a name is not one of them; then
    the model is as it was.
    """
    found = {f.name: f for f in mixers(model)}
    if not found:
        raise RetrofitError(f"{type(model).__name__} has no recurrent mixer that MC could wrap")
    strange = set(covers) - set(found)
    if strange:
        raise RetrofitError(
            f"no mixer is called {sorted(strange)[0]!r} (they are: {', '.join(found)})"
        )
    wrapped, width = [], model.get_input_embeddings().embedding_dim
    try:
        for name, cover in covers.items():
            if cover.heads:
                _attach(found[name], config, cover, width)
                wrapped.append(name)
    except BaseException:
        for name in wrapped:
            _detach(found[name].module)
        raise
    return wrapped


def revert_(model: nn.Module) -> None:
    """Take all caching off: the model is bit for bit what it was."""
    for module in model.modules():
        if isinstance(getattr(module, "mc", None), Gate):
            _detach(module)


def _detach(module: nn.Module) -> None:
    del module.mc
    del module.forward


@contextmanager
def retrofitted(
    model: nn.Module, config: CachingConfig, covers: Mapping[str, Cover] | None = None
) -> Iterator[nn.Module]:
    """The model with caching inside the block, and as it was after it."""
    retrofit_(model, config, every_head(model) if covers is None else covers)
    try:
        yield model
    finally:
        revert_(model)


def plans(model: nn.Module) -> dict[str, Plan]:
    """The plans of the wrapped mixers, by name."""
    return {
        n: m.mc.plan for n, m in model.named_modules() if isinstance(getattr(m, "mc", None), Gate)
    }


@contextmanager
def listening(
    model: nn.Module, hear: Callable[[str, Streams, Tensor | None], None]
) -> Iterator[None]:
    """Run unmodified mixers while `hear(name, streams, valid)` gets what each hands to its op."""
    found = mixers(model)
    with paused(model):
        for one in found:
            _bind(one, _heard(one, hear))
        try:
            yield
        finally:
            for one in found:
                del one.module.forward


def shapes(model: nn.Module) -> dict[str, tuple[int, int, int, int, int]]:
    """The `sizes` of every mixer: heads, key and value width, numbers of states; from one token."""
    seen: dict[str, tuple[int, int, int, int, int]] = {}
    memories = {one.name: one.op.MEMORY for one in mixers(model)}

    def hear(name: str, streams: Streams, valid: Tensor | None) -> None:
        seen[name] = sizes(streams, memories[name])

    with torch.no_grad(), listening(model, hear):
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    return seen


def every_head(model: nn.Module) -> dict[str, Cover]:
    """A cover of every head of every mixer, without statistics."""
    return {
        name: Cover(list(range(heads)), heads, torch.ones(heads, keys))
        for name, (heads, keys, *_) in shapes(model).items()
    }


def _attach(found: Found, config: CachingConfig, cover: Cover, width: int) -> None:
    if isinstance(getattr(found.module, "mc", None), Gate):
        raise RetrofitError(f"{found.name} is wrapped already; call revert_ first")
    why = refusal(config.segment, getattr(found.module, "inner_chunk", 1))
    if why is not None:
        raise RetrofitError(f"{found.name}: {why}")
    sizes = (cover.mask.shape[1], width if config.gate else 0)
    gate = Gate(cover.heads, *sizes, cover.whiten is not None, config.rank)
    for name in ("mask", "mean", "std", "whiten"):
        if getattr(cover, name) is not None:
            getattr(gate, name).copy_(getattr(cover, name))
    with named(found.name):
        gate.plan = Plan(config, gate, found.op.MEMORY, cover.total, cover.each)
    _bind(found, _caching(found.op))
    device = next(found.module.parameters()).device
    # a skeleton's gates are real: their values are what an export writes
    found.module.mc = gate if device.type == "meta" else gate.to(device)


def _caching(op: ModuleType) -> Callable:
    def run(
        host: Published,
        *args: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        state_v_first: bool = False,
        valid: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        # its own, so that a copy of the model reads by its own gate
        plan = host.module.mc.plan
        valid = host.valid if valid is None else valid
        streams = silence(op.streams(*args, **options), valid)
        state = to_state(initial_state, streams, state_v_first, plan.memory)
        segments = host.segments(lambda: plan.start(len(streams.q), streams.q.device))
        out, state = cached_scan(plan, streams, state, segments, host.x, valid)
        out = out.to(streams.v.dtype)
        return out, from_state(state, state_v_first) if output_final_state else None

    return run


def _heard(found: Found, hear: Callable[[str, Streams, Tensor | None], None]) -> Callable:
    def run(host: Published, *args: Tensor, valid: Tensor | None = None, **options: Any):
        valid = host.valid if valid is None else valid
        hear(found.name, found.op.streams(*args, **options), valid)
        return call(found.op, *args, valid=valid, **options)

    return run


def _bind(found: Found, run: Callable) -> None:
    """Give the instance a forward whose op names resolve to `run(published, ...)`."""
    function = inspect.unwrap(type(found.module).forward)
    signature = inspect.signature(function)
    host = Calls()

    def op(*args: Any, **kwargs: Any) -> Any:
        return run(host.made[-1], *args, **kwargs)

    private = by_device(function)
    private |= {name: entry(found.op, name, op) for name in found.calls}
    private |= dict.fromkeys(getattr(found.op, "SHORTCUTS", ()), nothing)
    rebuilt = renamed(function, private)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        host.made.append(Published(self, signature.bind(self, *args, **kwargs).arguments))
        try:
            return rebuilt(self, *args, **kwargs)
        finally:
            host.made.pop()

    found.module.forward = MethodType(forward, found.module)


@contextmanager
def paused(model: nn.Module) -> Iterator[nn.Module]:
    """The wrapped model without its caching inside the block: the base, for a side by side."""
    wrapped = [m for m in model.modules() if isinstance(getattr(m, "mc", None), Gate)]
    forwards = [m.__dict__.pop("forward") for m in wrapped]
    try:
        yield model
    finally:
        for module, forward in zip(wrapped, forwards, strict=True):
            module.forward = forward
