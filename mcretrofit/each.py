"""Settings that every cached head of a mixer may have for itself: which are best differs by head (MATH 16).

A file lists them by name, a value for each cached head; what it does not list is the configuration's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from mcretrofit.config import CachingConfig, checked
from mcretrofit.errors import RetrofitError, UsageError, unknown

EACH = ("router", "init", "top_k", "temperature")


def differing(
    config: CachingConfig, heads: Sequence[Mapping[str, Any]]
) -> dict[str, list[Any]] | None:
    """What to keep of some heads' own settings; None where all are the configuration's."""
    columns = {name: [own.get(name, getattr(config, name)) for own in heads] for name in EACH}
    kept = {
        name: column
        for name, column in columns.items()
        if any(one != getattr(config, name) for one in column)
    }
    return kept or None


def check_each(each: Any, count: int, where: str) -> None:
    """Refuse settings of `count` heads that are not one known value for each."""
    if each is None:
        return
    if not isinstance(each, dict):
        raise RetrofitError(f"{where}: each has to map settings to lists")
    hints = get_type_hints(CachingConfig)
    for name, column in each.items():
        if name not in EACH:
            raise RetrofitError(f"{where}: {unknown('setting of a head', str(name), EACH)}")
        if not isinstance(column, list) or len(column) != count:
            raise RetrofitError(f"{where}: {name} has to name one for each of {count} heads")
        for value in column:
            try:
                CachingConfig(**{name: checked(value, hints[name], f"each: {name}")})
            except UsageError as error:
                raise RetrofitError(f"{where}: {error}") from error
