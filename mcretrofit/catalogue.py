"""What there is to choose from: every registry's entries with the first line of their docs."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from mcretrofit import registry
from mcretrofit.config import VARIANTS
from mcretrofit.errors import unknown
from mcretrofit.tasks import ALIASES

FOLDERS = {
    "families": "models",
    "routers": "routers",
    "tasks": "tasks",
    "aggregators": "aggregators",
    "memories": "memories",
    "ops": "ops",
}
KINDS = ("variants", *FOLDERS, "hosts", "builtins")


class Entry(NamedTuple):
    """A name that can be given to an option, and what it is."""

    name: str
    doc: str


class Family(NamedTuple):
    """A family of checkpoints: its memory, how it lies on disk, and what it was held against."""

    name: str
    doc: str
    memory: str = ""
    layouts: tuple[str, ...] = ()
    parity: str = ""
    tested: str = ""


def entries(kind: str) -> list[Entry] | list[Family]:
    """The entries of one of `KINDS`; nothing is imported, so this is quick."""
    if kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    if kind == "variants":
        return [Entry(name, variant.doc) for name, variant in VARIANTS.items()]
    if kind == "builtins":
        return builtins()
    if kind == "families":
        return [_family(name) for name in registry.names("models")]
    if kind == "hosts":
        hosts = _literal(_parsed("models", "_native"), "HOSTS")
        return [Entry(name, f"transformers' own class; op {op}") for name, op in hosts.items()]
    found = [Entry(name, _doc(FOLDERS[kind], name)) for name in registry.names(FOLDERS[kind])]
    if kind == "tasks":
        docs = dict(found)
        found += [Entry(name, f"{docs[stem]} (short for {stem})") for name, stem in ALIASES.items()]
    return found


def builtins() -> list[Entry]:
    """The embedded models: each is `builtin:NAME` to every command."""
    folder = Path(__file__).parent / "checkpoints"
    return [Entry(p.parent.name, _model(p)) for p in sorted(folder.glob("*/config.json"))]


def _model(path: Path) -> str:
    config = json.loads(path.read_text(encoding="utf-8"))
    layers, length = config.get("num_hidden_layers"), config.get("max_position_embeddings")
    return f"builtin:{path.parent.name}, {layers} layers, trained at {length} tokens"


def _family(name: str) -> Family:
    return Family(name, _doc("models", name), **_literal(_parsed("models", name), "ABOUT"))


def _doc(folder: str, name: str) -> str:
    return (ast.get_docstring(_parsed(folder, name)) or "").split("\n", 1)[0]


def _parsed(folder: str, name: str) -> ast.Module:
    spec = find_spec(f"mcretrofit.{folder}")
    source = Path(spec.submodule_search_locations[0]) / f"{name}.py"
    return ast.parse(source.read_text(encoding="utf-8"))


def _literal(tree: ast.Module, name: str) -> dict[str, Any]:
    """A dictionary that a module writes out under `name`; empty where it has none."""
    found = (node for node in tree.body if isinstance(node, ast.Assign))
    named = (node.value for node in found if ast.unparse(node.targets[0]) == name)
    return next(map(ast.literal_eval, named), {})
