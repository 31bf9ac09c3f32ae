"""What flash-linear-attention's kernels need under TRITON_INTERPRET=1 on a machine without a GPU."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from math import prod

import triton.language as tl
from triton.runtime.autotuner import Autotuner


class Index(int):
    """A loop variable with the one tensor method that kernels call on theirs."""

    def to(self, dtype: object) -> Index:
        return self

    def __add__(self, other: object) -> object:
        return _kept(int.__add__(self, other))

    def __sub__(self, other: object) -> object:
        return _kept(int.__sub__(self, other))

    def __mul__(self, other: object) -> object:
        return _kept(int.__mul__(self, other))


def _kept(value: object) -> object:
    return Index(value) if isinstance(value, int) else value


def index_range(*bounds: object) -> Iterator[Index]:
    """`range` over interpreter scalars, giving `Index`."""
    return map(Index, builtins.range(*map(int, bounds)))


def without_benchmarks() -> None:
    """Autotuners take the config with the largest blocks; timing one would ask for a GPU."""
    prune = Autotuner.prune_configs

    def one(self: Autotuner, kwargs: dict) -> list:
        sizes = {
            c: prod(s for s in c.kwargs.values() if isinstance(s, int)) for c in prune(self, kwargs)
        }
        return [max(sizes, key=sizes.get)]

    Autotuner.prune_configs = one


def adapt(package: str) -> None:
    """Every imported module of `package`: loops over `Index`, triton's functions looked up late.

    The interpreter swaps the functions of `triton.language` while a kernel runs; a module that
    holds them by name would keep the compiler's.
    """
    for name, module in list(sys.modules.items()):
        if not name.startswith(f"{package}.") or module is None:
            continue
        held = dict(vars(module))
        for key, value in held.items():
            if tl.core.is_builtin(value) and hasattr(tl, value.__name__):
                setattr(module, key, _late(value.__name__))
        if any("triton" in type(value).__module__ for value in held.values()):
            module.range = index_range


def _late(name: str) -> object:
    return lambda *args, **kwargs: getattr(tl, name)(*args, **kwargs)
