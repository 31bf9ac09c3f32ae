"""`mcretrofit eval`: a task by length, base and retrofit side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mcretrofit.cli import _render as render
from mcretrofit.cli import _results as results
from mcretrofit.cli._models import chosen, covered, fitting, opened
from mcretrofit.cli._options import Config, Device, Json, MaybeModel, Seed, Set, caching_flags
from mcretrofit.settings import assigned, settings

DEFAULT = ("niah", "perplexity")
TASKS = (
    "niah, mqar, perplexity ...: mcretrofit list tasks; lm-eval:NAME runs one of "
    "lm-evaluation-harness [niah,perplexity]."
)


@caching_flags
def command(
    model: MaybeModel = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help=TASKS),
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Tokens (512, 4k) or times the trained length (2x), by commas.")
    ] = "",
    samples: Annotated[int | None, typer.Option(help="Samples a length [32, of text 8].")] = None,
    seed: Seed = 42,
    depth: Annotated[
        str, typer.Option(help="Needle's depths in percent, by commas: a cell each [drawn].")
    ] = "",
    template: Annotated[
        str | None, typer.Option(help="Dialect: ruler, compact or a YAML file [by vocabulary].")
    ] = None,
    haystack: Annotated[str | None, typer.Option(help="Text to hide needles in.")] = None,
    pairs: Annotated[int | None, typer.Option(help="Key-value pairs (mqar) [4].")] = None,
    data: Annotated[Path | None, typer.Option(help="Your file for squad, longbench ...")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of a task's own, such as num_passes=2."),
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="A folder of your own lm-eval task files.")
    ] = None,
    base_only: Annotated[
        bool, typer.Option("--base-only", help="Measure the unmodified model alone.")
    ] = False,
    controls: Annotated[
        bool,
        typer.Option(
            "--controls/--no-controls",
            help="Random, most recent, no and the right segments too [off].",
            show_default=False,
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="A .jsonl file to add rows to.")] = None,
    config: Config = None,
    device: Device = "cpu",
    set_: Set = None,
    json: Json = False,
    caching: dict[str, Any] | None = None,
) -> None:
    """Measure base and retrofit side by side.

    Recall and text by length, on the same samples. A wrapped folder keeps its rows in rows.jsonl
    too, for the card that export writes.
    """
    place = chosen(model)
    from mcretrofit.compare import Request, cells, check

    names = tuple(name for words in task or DEFAULT for name in words.split(",") if name)
    tasks = tuple(name for name in names if not name.startswith(results.HARNESS))
    words = tuple(word for word in lengths.split(",") if word)
    depths = results.depths(depth.split(",") if depth else ())
    request = Request(tasks, words, samples, seed, depths, template, haystack, pairs)
    own = tuple(assigned(one, "--option") for one in option or ())
    request = replace(request, data=None if data is None else str(data), options=own)
    check(request)
    settings(None, None, caching, set_ or ())
    write = results.appender(out)
    if tasks:
        how = {"config": config, "device": device, "bare": base_only}
        fitting(place, request, caching, set_ or (), **how)
    bare = opened(place, config, device)
    todo = cells(bare, request) if tasks else []
    found = covered(bare, caching, set_ or (), base_only)
    own = None if base_only or caching or set_ else results.ledger(Path(place))
    remember = results.appender(own)
    rows: list[results.Row] = []

    def keep(row: results.Row) -> None:
        rows.append(row)
        write(row)
        remember(row)
        if json:
            render.json_row(row)

    complete = False
    try:
        if todo:
            results.measure(found, todo, base_only, keep, controls)
        if len(names) > len(tasks):
            asked = (names, include_path, samples, seed)
            results.measure_harness(found, asked, base_only, keep)
        complete = True
    finally:
        # after Ctrl-C too: what is done is done
        results.finish(rows, complete, json)
