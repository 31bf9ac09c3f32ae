"""Model cards of wrapped and exported folders, in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcretrofit.config import CachingConfig
from mcretrofit.errors import RetrofitError

if TYPE_CHECKING:
    from mcretrofit.calibrate import Head

_FRONT = "---\nlibrary_name: {library}\ntags: [memory-caching]\n---\n"
_WRAPPED = """# {name} with Memory Caching ({variant})

{summary} of a {family} model. This folder holds no weights: `caching.json` names the base.

    mcretrofit eval THIS_FOLDER --task niah
    mcretrofit generate THIS_FOLDER --prompt "..."
    mcretrofit export THIS_FOLDER --out export

{settings}
"""
_EXPORTED = """# {name}

A {family} model with {what} (arXiv 2602.24281), frozen weights of its base.

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("path/to/this/folder", trust_remote_code=True)

It needs torch, transformers and safetensors, nothing else.
"""
_PLAIN = "\nLoaded without `trust_remote_code`, the same folder is the unmodified base.\n"
_CELL = ("task", "length", "dialect", "depth", "pairs")
_COLUMNS = ("task", "length", "base", "retrofit", "metric", "n", "verdict")


def wrapped_card(
    name: str, family: str, caching: CachingConfig, summary: str, heads: Sequence[Head]
) -> str:
    """What `wrap` leaves beside caching.json."""
    settings = markdown(("setting", "value"), asdict(caching).items())
    text = _WRAPPED.format(
        name=name, variant=caching.variant, summary=summary, family=family, settings=settings
    )
    if heads:
        rows = [(h.mixer, h.head, f"{h.tau:.0f}", h.why) for h in heads]
        text += "\n" + markdown(("mixer", "head", "time constant", "why"), rows) + "\n"
    return _FRONT.format(library="mcretrofit") + text


def exported_card(
    name: str,
    family: str,
    caching: CachingConfig | None,
    rows: Iterable[Mapping[str, Any]],
    native: bool = False,
) -> str:
    """What `export` leaves beside the weights; `rows` are results of `compare`.

    `native`: transformers has a class for the model, which ignores the caching's tensors.
    """
    what = "no caching" if caching is None else f"Memory Caching ({caching.variant})"
    text = _EXPORTED.format(name=name, family=family, what=what)
    if native and caching is not None:
        text += _PLAIN
    if caching is not None:
        text += "\n## Caching\n\n" + markdown(("setting", "value"), asdict(caching).items()) + "\n"
    cells = [
        (r["task"], r["length"], f"{r['base_score']:.4g}", f"{r['score']:.4g}", r["metric"])
        + (r["n"], r["verdict"])
        for r in rows
    ]
    if cells:
        text += "\n## Measured, on the same samples\n\n" + markdown(_COLUMNS, cells) + "\n"
    return _FRONT.format(library="transformers") + text


def latest(path: Path) -> list[dict[str, Any]]:
    """The newest row of every cell in a `rows.jsonl`; none where there is no such file."""
    if not path.is_file():
        return []
    cells: dict[tuple, dict[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            cell = tuple(row[name] for name in _CELL)
            _ = [row[name] for name in ("base_score", "score", "metric", "n", "verdict")]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise RetrofitError(f"{path}, line {number}: not a row of results") from error
        cells[cell] = row
    return [cells[cell] for cell in sorted(cells, key=lambda c: (str(c[0]), c[1]))]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of pipes."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
