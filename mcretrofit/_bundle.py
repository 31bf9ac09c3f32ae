"""Modeling code for a folder that has to run without mcretrofit: our modules as flat files.

transformers copies the files that lines `from .x import y` name, flat ones only, and refuses
absolute imports of packages that are not installed. So every import of ours is rewritten, found by
its place in the syntax tree, and the registry of folders becomes a written-out one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from mcretrofit import __version__
from mcretrofit.errors import RetrofitError

ENTRIES = (
    "mcretrofit.exported.configuration_mcretrofit",
    "mcretrofit.exported.modeling_mcretrofit",
)
NATIVE = ("mcretrofit.exported.native", "mcretrofit.models._native")
OURS = ("mcretrofit", "mcretrofit_kernels")
REGISTRY = "mcretrofit.registry"
PRESENT = {*sys.stdlib_module_names, "torch", "transformers", "safetensors", "numpy"}
_REGISTRY_TEXT = '''"""The modules that this model needs, by folder: a registry written out."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from .{errors} import unknown

if TYPE_CHECKING:
    # only files that such lines name are copied
    {lines}

FOLDERS: dict[str, tuple[str, ...]] = {folders}


def names(folder: str) -> list[str]:
    """The entries of a folder, sorted."""
    return list(FOLDERS[folder])


def load(folder: str, name: str) -> ModuleType:
    """A folder's module; an unknown name suggests the nearest one."""
    if name not in FOLDERS[folder]:
        raise unknown(folder.removesuffix("s"), name, FOLDERS[folder])
    return import_module(f".mc_{{folder}}_{{name}}", __package__)
'''


_NATIVE_TEXT = '''"""{name} of transformers with the caching that config.json describes."""

from __future__ import annotations

from .{native} import native_class
from .{mixin} import Caching


class {name}(Caching, native_class("{kind}")):
    """The language model; `*.mc.*` tensors are loaded like all others."""
'''


class Edit(NamedTuple):
    """Bytes [start, end) of a source that become `text`."""

    start: int
    end: int
    text: str


def bundle(plugs: Mapping[str, Sequence[str]], entries: Sequence[str] = ENTRIES) -> dict[str, str]:
    """File name -> text: the entries, the named modules of each folder, all that they import."""
    roots = [f"mcretrofit.{folder}.{name}" for folder, names in plugs.items() for name in names]
    texts: dict[str, str] = {}
    waiting = [*entries, *roots, "mcretrofit.errors"]
    while waiting:
        name = waiting.pop()
        if name not in texts and name != REGISTRY:
            source = _source(name).read_text(encoding="utf-8")
            texts[name], needed = flatten(name, source)
            waiting += sorted(needed)
    texts[REGISTRY] = _registry(plugs, [name for name in texts if name not in ENTRIES])
    files = {f"{flat(name)}.py": _header(name) + text for name, text in sorted(texts.items())}
    if len(files) < len(texts):
        raise RetrofitError("two modules of mcretrofit have one name in an exported folder")
    return files


def native_bundle(plugs: Mapping[str, Sequence[str]], name: str, kind: str) -> dict[str, str]:
    """As `bundle`, around transformers' class `name` of the model type `kind`."""
    native, mixin = flat(NATIVE[1]), flat(NATIVE[0])
    text = _NATIVE_TEXT.format(name=name, kind=kind, native=native, mixin=mixin)
    entry = ENTRIES[1]
    return {**bundle(plugs, NATIVE), f"{flat(entry)}.py": _header(entry) + text}


def flat(name: str) -> str:
    """The name of a module of ours among the flat files."""
    if name in ENTRIES:
        return name.rpartition(".")[2]
    root, _, rest = name.partition(".")
    return "_".join(["mc", *(["kernels"] if root == OURS[1] else []), *rest.split(".")])


def flatten(name: str, text: str) -> tuple[str, set[str]]:
    """The source of a module with flat, relative imports, and the modules of ours that it needs."""
    source, needed, edits = text.encode(), set(), []
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, typing_only in _imports(ast.parse(text)):
        lines, more = _rewritten(name, node, typing_only)
        if lines:
            start, end = (
                starts[line - 1] + column
                for line, column in (
                    (node.lineno, node.col_offset),
                    (node.end_lineno, node.end_col_offset),
                )
            )
            edits.append(Edit(start, end, ("\n" + " " * node.col_offset).join(lines)))
        needed |= more
    for edit in sorted(edits, reverse=True):
        source = source[: edit.start] + edit.text.encode() + source[edit.end :]
    return source.decode(), needed


def _imports(node: ast.AST, typing_only: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, typing_only
        else:
            checked = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imports(child, typing_only or checked)


def _rewritten(
    name: str, node: ast.Import | ast.ImportFrom, typing_only: bool
) -> tuple[list[str], set[str]]:
    """The lines in place of an import statement (none: it stays), and what it needs of ours."""
    if isinstance(node, ast.Import):
        roots = {alias.name.partition(".")[0] for alias in node.names}
        if roots & set(OURS):
            raise RetrofitError(
                f"cannot export {name}: write line {node.lineno} as from ... import ..."
            )
        return _guarded(node, roots), set()
    base = _absolute(name, node)
    if base.partition(".")[0] not in OURS:
        return _guarded(node, {base.partition(".")[0]}), set()
    if typing_only:
        return ["pass"], set()
    modules = {a: f"{base}.{a.name}" for a in node.names if _source(f"{base}.{a.name}", False)}
    symbols = [ast.unparse(a) for a in node.names if a not in modules]
    lines = [f"from .{flat(base)} import {', '.join(symbols)}"] if symbols else []
    lines += [f"from . import {flat(m)} as {a.asname or a.name}" for a, m in modules.items()]
    return lines, {*modules.values(), *([base] if symbols else [])}


def _guarded(node: ast.stmt, roots: set[str]) -> list[str]:
    """Packages that may be absent have to be imported inside try, or transformers demands them."""
    if roots <= PRESENT:
        return []
    return ["try:", f"    {ast.unparse(node)}", "except ImportError:", "    raise"]


def _absolute(name: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = name if _source(name).name == "__init__.py" else name.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{node.module}" if node.module else package


def _source(name: str, needed: bool = True) -> Path | None:
    """The file of a module of ours; None where there is none and it is not `needed`."""
    root, _, rest = name.partition(".")
    place = Path(find_spec(root).submodule_search_locations[0], *rest.split("."))
    for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
        if rest and file.is_file():
            return file
    if needed:
        raise RetrofitError(f"cannot export: {name} is not a module that can stand alone")
    return None


def _registry(plugs: Mapping[str, Sequence[str]], modules: list[str]) -> str:
    lines = [f"from .{flat(name)} import __doc__ as _" for name in sorted(modules)]
    folders = {folder: tuple(sorted(names)) for folder, names in sorted(plugs.items())}
    return _REGISTRY_TEXT.format(
        errors=flat("mcretrofit.errors"), lines="\n    ".join(lines), folders=folders
    )


def _header(name: str) -> str:
    return f"# generated by mcretrofit {__version__} from {name}: changes belong there\n"
