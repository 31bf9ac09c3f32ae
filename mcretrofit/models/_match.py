"""What a model expects against what a checkpoint holds: every tensor is accounted for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

from mcretrofit.errors import RetrofitError

Shape = Sequence[int]


class Found(Protocol):
    """What `match` needs of a checkpoint."""

    path: str

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...


def match(
    expected: Mapping[str, Shape],
    found: Found | Mapping[str, Shape],
    *,
    tied: Mapping[str, str] | None = None,
    harmless: Iterable[str] = (),
) -> list[str]:
    """The names to load, in the model's order; RetrofitError lists all that does not fit.

    `tied` maps a name to the one it shares its values with: either may be absent, and the
    source wins. `harmless` are patterns of names that a checkpoint may hold for nothing.
    """
    tied = {name: source for name, source in (tied or {}).items() if source in expected}
    expected = {**expected, **{name: expected[source] for name, source in tied.items()}}
    where = "the checkpoint" if isinstance(found, Mapping) else found.path
    shapes = found if isinstance(found, Mapping) else {n: found.shape(n) for n in found.names()}
    shared = {name for name, source in tied.items() if source in shapes}
    spared = {source for name, source in tied.items() if name in shapes and name not in shared}
    wanted = [name for name in expected if name not in shared and name not in spared]
    missing = [name for name in wanted if name not in shapes]
    harmless = tuple(harmless)
    surplus = [
        name
        for name in shapes
        if name not in expected and not any(fnmatchcase(name, p) for p in harmless)
    ]
    wrong = [
        f"{name} is {list(shapes[name])}, expected {list(expected[name])}"
        for name in expected
        if name in shapes and tuple(shapes[name]) != tuple(expected[name])
    ]
    faults = (("missing", missing), ("surplus", surplus), ("of the wrong shape", wrong))
    report = "; ".join(_count(kind, names) for kind, names in faults if names)
    if report:
        raise RetrofitError(f"{where} does not fit the model: {report}")
    return wanted


def _count(kind: str, names: list[str]) -> str:
    more = ", ..." if len(names) > 3 else ""
    plural = "" if len(names) == 1 else "s"
    return f"{len(names)} tensor{plural} {kind} ({', '.join(names[:3])}{more})"
