"""A caching configuration from what a user gives: base < YAML recipe < flags < `key=value`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from mcretrofit.config import CachingConfig, checked
from mcretrofit.errors import UsageError, unknown
from mcretrofit.yamlfile import mapping


def settings(
    base: CachingConfig | None = None,
    recipe: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    assignments: Iterable[str] = (),
    where: str = "flags",
) -> CachingConfig:
    """The checked configuration; raises `UsageError` naming the key and the nearest known one.

    `where` is what a message blames for a wrong flag.
    """
    given = {} if recipe is None else _typed(mapping(recipe), str(recipe))
    given |= _typed(flags or {}, where)
    given |= _typed(dict(map(assigned, assignments)), "--set")
    return (CachingConfig() if base is None else base).replace(**given)


def assigned(text: str, option: str = "--set") -> tuple[str, Any]:
    """The name and the YAML value of `key=value`; raises `UsageError` naming the option."""
    import yaml

    name, equals, value = text.partition("=")
    if not equals:
        example = "top_k=4" if option == "--set" else "num_passes=2"
        raise UsageError(f"{option} {text}: expected key=value, such as {option} {example}")
    try:
        return name.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UsageError(f"{option} {text}: {value!r} is not a value") from error


def _typed(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = get_type_hints(CachingConfig)
    typed = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise UsageError(f"{where}: {unknown('key', str(key), known)}")
        typed[name] = checked(value, known[name], f"{where}: {key}")
    return typed
