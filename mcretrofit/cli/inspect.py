"""`mcretrofit inspect`: what a model is and what caching it would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcretrofit.cli import _render as render
from mcretrofit.cli._options import Config, Json, Model
from mcretrofit.settings import settings

if TYPE_CHECKING:
    from mcretrofit.costs import Cost, Described


def command(
    model: Model,
    segment: Annotated[int | None, typer.Option(help="Tokens of a segment [256].")] = None,
    router: Annotated[str | None, typer.Option(help="Router of the cost table.")] = None,
    lengths: Annotated[str, typer.Option(help="Lengths of the cost table.")] = "1k,4k,16k,64k",
    config: Config = None,
    json: Json = False,
) -> None:
    """Tell what a model is and what caching costs.

    Family, layers, state bytes and the cost of every variant by length, from headers alone.
    """
    asked = {"segment": segment, "router": router}
    asked = {name: value for name, value in asked.items() if value is not None}
    settings(flags=asked)
    from mcretrofit import costs
    from mcretrofit.compare import lengths as in_tokens

    found = costs.describe(model, config)
    caching = settings(found.config, flags=asked)
    table = costs.costs(found, caching, in_tokens(lengths.split(","), found.trained_length))
    warning = costs.too_long(caching, {m.name: [m.keys] for m in found.skeleton.mixers})
    notes = costs.of_networks(found.skeleton, caching)
    facts = _facts(found)
    if json:
        rows = [{**c._asdict(), "ratio": round(c.ratio, 4)} for c in table]
        heads = found.covers or {}
        told = {"warning": warning, "notes": notes, "covers": heads, "costs": rows}
        render.json_row({**facts, **told})
    else:
        render.table("", ("", ""), facts.items())
        _cost_tables(table, caching.segment, caching.router)
        _heads(found)
        for one in [*([warning] if warning else []), *notes]:
            render.note(f"warning: {one}")


def _facts(found: Described) -> dict[str, Any]:
    bones = found.skeleton
    sizes = sorted({(m.heads, m.keys, m.values, m.cached * m.deep) for m in bones.mixers})
    facts = {
        "model": found.name,
        "family": bones.family,
        "layers": bones.layers,
        "mixers": len(bones.mixers),
        "heads": " / ".join(
            f"{h} of {k} x {v}" + (f", networks of {n} weights" if n else "")
            for h, k, v, n in sizes
        ),
        "state_bytes": found.state_bytes,
        "parameters": bones.parameters,
        "dtype": bones.dtype,
        "tokenizer": found.tokenizer or "not found",
        "trained_length": found.trained_length or "unknown",
    }
    if found.config is not None:
        cached = sum(bool(n) for n in found.covered.values())
        facts["wrapped"] = (
            f"{cached} of {bones.layers} layers, {found.config.variant}"
            if found.covers is not None
            else f"{found.config.variant}, heads not chosen yet (the first load measures them)"
        )
    return facts


def _cost_tables(table: list[Cost], segment: int, router: str) -> None:
    lengths = sorted({c.length for c in table})
    columns = ("variant", *map(render.tokens, lengths))
    held, read = {}, {}
    for c in table:
        held.setdefault(c.variant, []).append(f"{render.size(c.cached_bytes)} ({c.ratio:.2f})")
        read.setdefault(c.variant, []).append(f"{c.read_macs / 1e6:.3g}")
    for c in table[: len(lengths)]:
        held.setdefault("KV cache", []).append(render.size(c.kv_bytes))
        read.setdefault("attention", []).append(f"{c.kv_macs / 1e6:.3g}")
    what = f"segment {segment}, router {router}"
    title = f"\nCached bytes (share of a KV cache of this shape), {what}"
    render.table(title, columns, [(name, *cells) for name, cells in held.items()])
    title = "\nMillions of multiply-adds a token for reading the past"
    render.table(title, columns, [(name, *cells) for name, cells in read.items()])


def _heads(found: Described) -> None:
    rows = [
        (name, head, "yes" if head in layer["heads"] else "no", why)
        for name, layer in (found.covers or {}).items()
        for head, why in enumerate(layer.get("why", []))
    ]
    if rows:
        render.table("\nHeads", ("mixer", "head", "cached", "why"), rows)
