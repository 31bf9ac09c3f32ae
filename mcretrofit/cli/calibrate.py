"""`mcretrofit calibrate`: choose heads, scores and thresholds by planted facts and prose."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcretrofit.cli import _render as render
from mcretrofit.cli._models import FOLDER, prose
from mcretrofit.cli._options import Config, Force, Json, Model, Recipe, Set, caching_flags
from mcretrofit.errors import UsageError
from mcretrofit.settings import settings

if TYPE_CHECKING:
    from mcretrofit.calibrate import Head
    from mcretrofit.choices import Choice
    from mcretrofit.refine import Tried
    from mcretrofit.search import Outcome
    from mcretrofit.wrap import Wrapping

OVER = "over the budget"
MANY = 40  # heads: above it the table has only those that forget slowly


@caching_flags
def command(
    model: Model,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text to plant facts in, a file or a folder; prose ships with the package."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder to write [./retrofit; a wrapped one itself].")
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens of a sequence [8 times the trained length].")
    ] = None,
    samples: Annotated[int, typer.Option(help="Sequences to search on, and to confirm on.")] = 4,
    pairs: Annotated[int, typer.Option(help="Facts planted in each.")] = 16,
    budget_mb: Annotated[
        float | None, typer.Option(help="The most that cached segments may take at --length.")
    ] = None,
    budget_ms: Annotated[
        float | None, typer.Option(help="The most that caching may add to a decoding step there.")
    ] = None,
    force: Force = False,
    config: Config = None,
    recipe: Recipe = None,
    set_: Set = None,
    json: Json = False,
    caching: dict[str, Any] | None = None,
) -> None:
    """Choose heads, scores and thresholds without training.

    Facts are planted in plain text and asked at its end. A head is cached where that helps the
    answers and leaves the prose alone; where nothing is confirmed the wrapped model is its base.
    """
    for name, value in (("--length", length), ("--samples", samples), ("--pairs", pairs)):
        if value is not None and value < 1:
            raise UsageError(f"{name} {value}: has to be at least 1")
    for name, value in (("--budget-mb", budget_mb), ("--budget-ms", budget_ms)):
        if value is not None and not value > 0:
            raise UsageError(f"{name} {value}: has to be above 0")
    words = prose(text, "--text")
    from mcretrofit.wrap import Search, wrap
    from mcretrofit.wrapped import base_name, is_wrapped, read

    kept = read(model) if is_wrapped(model) else None
    chosen = settings(None if kept is None else kept.config, recipe, caching, set_ or ())
    base, place = (model, Path(FOLDER)) if kept is None else (base_name(kept), Path(model))
    if kept is not None and kept.base.get("config"):
        config = Path(kept.base["config"])
    done = wrap(
        base,
        out or place,
        chosen,
        config=config,
        text=words,
        search=Search(length, samples, pairs, render.note, budget_mb, budget_ms),
        force=force or (kept is not None and out is None),
    )
    if json:
        measured = {"measured": [head._asdict() for head in done.heads]}
        told = {"model": model, "folder": str(done.folder), **_row(done.found), **measured}
        render.json_row(told)
    else:
        print(f"{done.summary} of {model} ({done.family}) into {done.folder}")
        tell(done)


def tell(done: Wrapping) -> None:
    """The table of heads and what the choice did to facts that it was not made on."""
    found = done.found
    tried = {(choice.mixer, choice.head): choice for choice in found.choices}
    heads = done.heads if len(done.heads) <= MANY else [h for h in done.heads if h[:2] in tried]
    finds = f"finds facts by {' / '.join(found.choices[0].hits)}" if tried else "finds facts"
    columns = ("mixer", "head", "time constant", finds, "score", "open for", "nats gained", "prose")
    rows = [_cells(head, tried.get(head[:2])) for head in heads]
    render.table("", (*columns, "cached", "why"), rows)
    if found.tried:
        columns = ("mixer", "head", "setting", "value", "nats gained", "prose", "taken")
        render.table("", columns, map(_setting, found.tried))
    if found.keeps_base:
        spared = any(choice.why.endswith(OVER) for choice in found.choices)
        confirmed = "no choice of heads was confirmed on other facts"
        print(f"keep the base: {'what helps is over the budget' if spared else confirmed}")
        return
    before, after = found.base, found.done
    print(
        f"on other facts: answers {before.right.mean():.3f} -> {after.right.mean():.3f}, "
        f"{found.low:+.3f} .. {found.high:+.3f} nats a token better (95 %), prose {found.prose:+.2%}"
    )
    if found.spent is not None:
        cost = (
            f"{found.spent.megabytes:.3g} MB and {found.spent.milliseconds:.2g} ms a decoding step"
        )
        print(f"it costs {cost} more at the length of the planted sequences")


def _setting(tried: Tried) -> tuple[object, ...]:
    over = "over budget" if math.isinf(tried.prose) else f"{tried.prose:+.2%}"
    return (*tried[:4], f"{-tried.answers:+.3f}", over, "yes" if tried.taken else "no")


def _cells(head: Head, choice: Choice | None) -> tuple[object, ...]:
    hits = "-" if choice is None else " / ".join(f"{hit:.2f}" for hit in choice.hits.values())
    shown = ("-",) * 4
    if choice is not None and choice.answers is not None:
        shown = (
            choice.kind.name,
            f"{choice.opens:.1%} of prose",
            f"{-choice.answers:+.3f}",
            f"{choice.prose:+.2%}",
        )
    used, why = ("yes" if head.cached else "no"), head.why if choice is None else choice.why
    return (head.mixer, head.head, render.tokens(head.tau), hits, *shown, used, why)


def _json(choice: Choice) -> dict[str, Any]:
    return {**choice._asdict(), "kind": choice.kind and choice.kind.name}


def _row(found: Outcome) -> dict[str, Any]:
    return {
        **asdict(found.config),
        "keeps_base": found.keeps_base,
        "choices": [_json(choice) for choice in found.choices],
        "answers_right": [found.base.right.mean().item(), found.done.right.mean().item()],
        "answers_gain": [found.low, found.high],
        "prose_change": found.prose,
        "tried": [one._asdict() for one in found.tried],
        "spent": None if found.spent is None else found.spent._asdict(),
    }
