"""Another router for each cached head: which score finds facts is a property of the head (MATH 16).

Summaries are as wide as the widest router's. Routers stand beside each other where they make keys and
questions in one way; one that looks at states alone (`STATES`) stands beside any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.errors import RetrofitError
from mcretrofit.memories._scan import tree
from mcretrofit.registry import load
from mcretrofit.routers import Asked, Opened
from mcretrofit.segments import Bank

ALIKE = ("UNIT", "USES_QUERY", "POSITIVE", "PARTS")


class _Group(NamedTuple):
    """The heads of one router, and how wide its summary is."""

    router: ModuleType
    heads: list[int]
    width: int

    def wide(self, summaries: Tensor) -> Tensor:
        """The group's own of summaries `[..., H, P]`."""
        return summaries[..., self.heads, : self.width]


def by_head(names: Sequence[str], keys: int) -> ModuleType | ByHead:
    """The router of heads that score by `names`, one each; the module itself where all are one."""
    return load("routers", names[0]) if len(set(names)) == 1 else ByHead(names, keys)


class ByHead:
    """The contract of a router, head by head; raises `RetrofitError` where two cannot be mixed."""

    def __init__(self, names: Sequence[str], keys: int) -> None:
        at = {name: [h for h, other in enumerate(names) if other == name] for name in names}
        self.groups = [
            _Group(module, heads, module.width(keys))
            for module, heads in ((load("routers", name), heads) for name, heads in at.items())
        ]
        self.order = [h for group in self.groups for h in group.heads]
        some = [g.router for g in self.groups if not getattr(g.router, "STATES", False)]
        for name in ALIKE:
            found = {getattr(router, name, None) for router in some}
            if len(found) > 1:
                raise RetrofitError(f"routers {' and '.join(at)} cannot stand beside each other")
            setattr(self, name, found.pop() or 0)
        self.TEMPERATURE = some[0].TEMPERATURE
        self.WHITENS, self.PLACES = (
            any(getattr(router, name, False) for router in some) for name in ("WHITENS", "PLACES")
        )
        adds = {h: getattr(g.router, "ADDS", True) for g in self.groups for h in g.heads}
        self.ADDS = [adds[h] for h in range(len(names))]
        if all(hasattr(group.router, "settled") for group in self.groups):
            self.settled = self._settled

    def width(self, keys: int) -> int:
        """Floats of a segment and head."""
        return max(group.router.width(keys) for group in self.groups)

    def summarise(self, keys: Tensor, valid: Tensor, part: Tensor | None = None) -> Tensor:
        """`[B, S, C, H, K]` -> `[B, S, H, P]`, what is narrower filled up with zeros."""
        return self._filled(
            lambda g: g.router.summarise(keys[..., g.heads, :], valid, *_looked(g.router, part))
        )

    def merge(self, before: Tensor, after: Tensor) -> Tensor:
        """The summaries `[..., H, P]` of two pieces as one."""
        return self._filled(
            lambda g: getattr(g.router, "merge", torch.add)(g.wide(before), g.wide(after))
        )

    def score(
        self, asked: Asked, bank: Bank, opened: Opened | None
    ) -> tuple[Tensor, Tensor | None]:
        """What the heads' own routers give."""
        found = [
            group.router.score(_asked(asked, group), _bank(bank, group), _opened(opened, group))
            for group in self.groups
        ]
        cached, online = zip(*found, strict=True)
        return self._joined(cached, 2), None if opened is None else self._joined(online, 2)

    def _settled(self, u: Tensor, opened: Opened) -> Tensor:
        parts = [g.router.settled(u[:, :, g.heads], _opened(opened, g)) for g in self.groups]
        return self._joined(parts, 2)

    def _filled(self, run: Callable[[_Group], Tensor]) -> Tensor:
        most = max(group.width for group in self.groups)
        parts = [F.pad(run(group), (0, most - group.width)) for group in self.groups]
        return self._joined(parts, -2)

    def _joined(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The groups' parts with their heads in order again."""
        order = torch.tensor(self.order, device=parts[0].device)
        return torch.cat(list(parts), dim).index_select(dim, order.argsort())


def _looked(router: ModuleType, part: Tensor | None) -> tuple[Tensor, ...]:
    asks = getattr(router, "PLACES", False) or getattr(router, "PARTS", 0)
    return (part,) if asks else ()


def _asked(asked: Asked, group: _Group) -> Asked:
    return asked._replace(
        u=asked.u[:, :, group.heads],
        q=asked.q[:, :, group.heads],
        online=asked.online[:, :, group.heads],
    )


def _bank(bank: Bank, group: _Group) -> Bank:
    states = bank.states
    if getattr(group.router, "STATES", False):
        states = tree(lambda s: s[:, :, group.heads], states)
    return bank._replace(states=states, summaries=group.wide(bank.summaries))


def _opened(opened: Opened | None, group: _Group) -> Opened | None:
    if opened is None:
        return None
    near = None if opened.near is None else opened.near[:, :, group.heads]
    return opened._replace(
        keys=opened.keys[:, :, group.heads], before=group.wide(opened.before), near=near
    )
