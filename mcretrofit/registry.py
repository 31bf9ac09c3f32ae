"""A folder is a registry: every module in it is one entry, named by its file's stem."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from mcretrofit.errors import unknown


def names(folder: str) -> list[str]:
    """The entries of `mcretrofit/<folder>/`, sorted; files that start with `_` are helpers."""
    spec = find_spec(f"mcretrofit.{folder}")
    if spec is None or not spec.submodule_search_locations:
        raise KeyError(f"mcretrofit has no folder {folder!r}")
    files = [p for place in spec.submodule_search_locations for p in Path(place).glob("*.py")]
    return sorted(p.stem for p in files if not p.stem.startswith("_"))


def load(folder: str, name: str) -> ModuleType:
    """The module `mcretrofit/<folder>/<name>.py`; an unknown name suggests the nearest one."""
    known = names(folder)
    if name not in known:
        raise unknown(folder.removesuffix("s"), name, known)
    return import_module(f"mcretrofit.{folder}.{name}")
