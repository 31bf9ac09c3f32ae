"""What there is to choose from: every registry's entries with the first line of their docs."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

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
KINDS = ("variants", *FOLDERS, "builtins")


class Entry(NamedTuple):
    """A name that can be given to an option, and what it is."""

    name: str
    doc: str


def entries(kind: str) -> list[Entry]:
    """The entries of one of `KINDS`; nothing is imported, so this is quick."""
    if kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    if kind == "variants":
        return [Entry(name, variant.doc) for name, variant in VARIANTS.items()]
    if kind == "builtins":
        return builtins()
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


def _doc(folder: str, name: str) -> str:
    spec = find_spec(f"mcretrofit.{folder}")
    source = Path(spec.submodule_search_locations[0]) / f"{name}.py"
    doc = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return doc.split("\n", 1)[0]
