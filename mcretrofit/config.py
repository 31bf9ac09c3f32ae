"""Configuration: frozen dataclasses, read strictly; an unknown key names the nearest known one."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from mcretrofit.errors import UsageError, unknown

T = TypeVar("T")


def from_mapping(kind: type[T], given: Any, where: str) -> T:
    """`kind(**given)`, refusing unknown and missing keys; `where` begins the message."""
    if not isinstance(given, dict):
        raise UsageError(f"{where}: expected keys and values, found {type(given).__name__}")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise UsageError(f"{where}: {unknown('key', str(name), known)}")
    missing = [
        f.name
        for f in known.values()
        if f.name not in given and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise UsageError(f"{where}: missing {', '.join(missing)}")
    return kind(**given)
