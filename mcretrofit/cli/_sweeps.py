"""A sweep carried out: planned, refused or dry, run under a progress bar, told at its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcretrofit import registry
from mcretrofit.cli import _render as render
from mcretrofit.cli._models import check_device
from mcretrofit.cli._results import CONTROLS, compared
from mcretrofit.errors import RetrofitError, UsageError

if TYPE_CHECKING:
    from mcretrofit.costs import Described
    from mcretrofit.executors._todo import Todo
    from mcretrofit.sweep import Plan, Recipe
    from mcretrofit.worker import Setup

Row = dict[str, Any]


class Stopped(RetrofitError):
    """Ctrl-C: what is finished is kept."""

    status = 130


def carry_out(
    recipe: Recipe,
    folder: Path,
    shard: str | None,
    how: tuple[str, int],
    dry: bool,
    as_json: bool,
) -> None:
    """Plan, check, run and tell; `how` is the executor and its workers."""
    from mcretrofit.needs import refuse
    from mcretrofit.sweep import plan

    part = _shard(shard)
    executor = registry.load("executors", how[0])
    if not dry:
        executor.check()
    check_device(recipe.device)
    described, traits = _traits(recipe)
    made = plan(recipe.axes, traits, recipe.controls)
    made = made if part is None else made.shard(*part)
    every = [(None, probe) for probe in made.bases.values()]
    every += [(job.caching, job.probe) for job in made.jobs]
    if dry:
        return _dry(made, described, recipe.device, as_json)
    refuse(described, every, recipe.device)
    _drawable(made, described)
    from mcretrofit.executors._todo import Todo
    from mcretrofit.ledger import Ledger
    from mcretrofit.worker import Setup

    ledger = Ledger(folder)
    for fault in ledger.faults:
        render.note(f"warning: {fault}")
    todo = Todo(made, ledger)
    setup = Setup(recipe.model or "", traits, recipe.controls, recipe.device, recipe.config)
    finished = len(made.jobs) - len(todo.pending)
    render.note(f"{len(made.jobs)} cells, {finished} of them finished before: {ledger.path}")
    try:
        _run(executor.execute, todo, setup, how[1], as_json)
    except KeyboardInterrupt as error:
        _tell(made, todo, as_json)
        done = len(made.jobs) - len(todo.pending)
        raise Stopped(
            f"interrupted: {done} of {len(made.jobs)} cells are kept in {ledger.path}; "
            "the same command goes on"
        ) from error
    finally:
        todo.close()
    _tell(made, todo, as_json)


def _run(execute: Callable, todo: Todo, setup: Setup, workers: int, as_json: bool) -> None:
    with render.progress(todo.tokens(), "loading") as bar:
        left = [todo.tokens()]

        def tick(count: int, text: str | None = None) -> None:
            bar(count, text)
            left[0] -= count

        todo.elsewhere = tick
        for row in execute(todo, setup, workers, tick):
            # what a control did not read, or more than was thought
            tick(left[0] - todo.tokens())
            if as_json:
                render.json_row(row)


def _drawable(made: Plan, described: Described) -> None:
    """One sample of each probe: a request that cannot be met ends before any work."""
    from mcretrofit.compare import draw
    from mcretrofit.model import tokenizer_of

    tokenizer = tokenizer_of(described.checkpoint, described.skeleton.model)
    for probe in made.bases.values():
        draw(probe._replace(count=1), tokenizer)


def _shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    number, slash, count = text.partition("/")
    whole = slash and number.isdigit() and count.isdigit()
    if not whole or not 1 <= int(number) <= int(count):
        raise UsageError(f"--shard {text}: expected i/n with i from 1 to n, such as 1/4")
    return int(number), int(count)


def _traits(recipe: Recipe) -> tuple[Described, Any]:
    from mcretrofit.costs import describe
    from mcretrofit.sweep import Traits
    from mcretrofit.wrapped import content, is_wrapped

    found = describe(recipe.model or "", recipe.config)
    text = found.skeleton.model.config.get_text_config()
    hashed = found.checkpoint.content()
    if is_wrapped(found.name):
        # its own setting is measured as it was calibrated and trained
        hashed = f"{hashed}+{content(Path(found.name))}"
    name = recipe.model or found.name
    return found, Traits(name, hashed, text.vocab_size, found.trained_length, found.config)


def _dry(made: Plan, described: Described, device: str, as_json: bool) -> None:
    """Every cell with the tokens to read and what it is predicted to need."""
    from mcretrofit.executors._todo import tokens
    from mcretrofit.needs import available, need

    cells = [(base, None, probe) for base, probe in made.bases.items()]
    cells += [(job.id, job.caching, job.probe) for job in made.jobs]
    rows, total, peak = [], 0, 0
    for name, config, probe in cells:
        count, found = tokens(probe, config, made.controls), need(described, config, probe, device)
        total, peak = total + count, max(peak, found.peak)
        row = {
            "id": name,
            "variant": "base" if config is None else config.variant,
            "segment": None if config is None else config.segment,
            "task": probe.task,
            "length": probe.length,
            "depth": probe.depth,
            "samples": probe.count,
            "seed": probe.seed,
            "tokens": count,
            "cache_bytes": found.cached,
            "peak_bytes": found.peak,
        }
        rows.append(row)
        if as_json:
            render.json_row(row)
    if as_json:
        return
    lines = []
    for row in rows:
        sizes = (render.size(row.pop("cache_bytes")), render.size(row.pop("peak_bytes")))
        lines.append((*("-" if v is None else v for v in row.values()), *sizes))
    render.table("", (*rows[0], "cache, at most", "memory, at most"), lines)
    free = available(device)
    room = "" if free is None else f", {render.size(free)} are free on {device}"
    print(f"{len(rows)} cells, {total:,} tokens, at most {render.size(peak)} of memory{room}")


def _tell(made: Plan, todo: Todo, as_json: bool) -> None:
    """The tables and, once every cell is there, which setting to take."""
    from mcretrofit.recommend import recommend
    from mcretrofit.results import labels

    todo.ledger.refresh()
    rows = [todo.ledger.rows[job.id] for job in made.jobs if job.id in todo.ledger.rows]
    todo.pending = [job for job in todo.pending if job.id not in todo.ledger.rows]
    if not rows:
        return
    if not as_json:
        names = labels(rows)
        groups: dict[tuple, list[Row]] = {}
        for row in rows:
            groups.setdefault((row["task"], row["dialect"], row["metric"]), []).append(row)
        for (task, dialect, metric), some in groups.items():
            title = f"{task} ({dialect} dialect): {metric.replace('_', ' ')}, n {some[0]['n']}"
            _table(title, some, names)
    if not todo.pending:
        (render.note if as_json else print)(recommend(rows).line)


def _table(title: str, rows: list[Row], names: dict[str, str]) -> None:
    from mcretrofit.results import setting

    where = [n for n in ("length", "depth", "seed", "pairs") if len({r[n] for r in rows}) > 1]
    checks = [n for n in CONTROLS if any((r["controls"] or {}).get(n) is not None for r in rows)]
    columns = ("setting", *(where or ["length"]), "base", "retrofit", "difference")
    columns += ("95 % interval", "verdict", *checks, "cache", "seconds", "to base")
    lines = [
        (
            names[setting(row)],
            *("-" if row[n] is None else f"{row[n]:g}" for n in where or ["length"]),
            *compared(row, checks),
            f"{row['prefill_ratio']:.2f}x" if row["prefill_ratio"] else "-",
        )
        for row in rows
    ]
    render.table(title, columns, lines)
    print()
