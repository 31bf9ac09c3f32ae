"""Base against retrofit on the same samples: one row for each task, length and depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from inspect import signature
from typing import Any, get_type_hints

from mcretrofit import registry
from mcretrofit.config import checked
from mcretrofit.controls import NAMES, outcomes
from mcretrofit.errors import UsageError, unknown
from mcretrofit.evaluate import Outcome, metric, run, task_samples
from mcretrofit.model import Loaded
from mcretrofit.retrofit import paused
from mcretrofit.rows import Cell, Probe, recommendation, row
from mcretrofit.tasks import ALIASES
from mcretrofit.tokenizer import Tokenizer

__all__ = ["Cell", "Probe", "Request", "cells", "compare", "probes", "recommendation", "row"]

COUNTS = {"accuracy": 32, "bits_per_byte": 8}  # samples unless said
SMALL = 8192  # vocabularies below it get the compact dialect


@dataclass(frozen=True)
class Request:
    """What to measure; None takes the default of the task, the model or its tokenizer."""

    tasks: tuple[str, ...]
    lengths: tuple[str, ...] = ()  # tokens (`512`, `4k`) or times the trained length (`2x`)
    samples: int | Mapping[str, int] | None = None  # of every task, or by task
    seed: int = 42
    depths: tuple[float, ...] = ()  # percent, one cell each; none: every sample draws its own
    template: str | None = None
    haystack: str | None = None
    pairs: int | None = None
    data: str | None = None  # a file of the user's
    options: tuple[tuple[str, Any], ...] = ()  # of the tasks' own


def lengths(words: Iterable[str], trained: int | None) -> list[int]:
    """Lengths in tokens; `2x` is twice the trained length, none asked for: four or five of them."""
    words = [word.strip().lower() for word in words]
    if not words and trained is not None and trained <= 2048:
        words = ["1x", "2x", "4x", "8x"]
    elif not words:
        words = ["512", "1k", "2k", "4k"] if trained is None else ["1k", "2k", "4k", "8k", "16k"]
    return sorted({_length(word, trained) for word in words})


def _length(word: str, trained: int | None) -> int:
    unit = {"k": 1024, "m": 1024**2, "x": trained}.get(word[-1:], 1)
    if unit is None:
        raise UsageError(
            f"--lengths {word}: the model does not say its trained length; give tokens, such as 1k"
        )
    try:
        tokens = float(word.rstrip("kmx")) * unit
    except ValueError:
        tokens = 0.0
    if not (math.isfinite(tokens) and tokens >= 1):
        raise UsageError(f"--lengths {word}: expected tokens such as 512, 4k or 2x, at least 1")
    return int(tokens)


def check(request: Request) -> list[str]:
    """The tasks' own names; raises `UsageError` for what is wrong whatever the model is."""
    tasks = [_task(name) for name in request.tasks]
    if request.pairs is not None and not any(_takes(task, "pairs") for task in tasks):
        raise UsageError(f"--pairs: {', '.join(tasks)} has no use for it (mqar has)")
    if request.depths and not any(map(_placed, tasks)):
        raise UsageError(f"--depth: {tasks[0]} has no single needle to place; leave the depth out")
    _check_options(request, tasks)
    for task in tasks:
        if _count(request, task) < 1:
            raise UsageError(f"--samples {_count(request, task)}: has to be at least 1")
    lengths(request.lengths, 1)
    return tasks


def _check_options(request: Request, tasks: list[str]) -> None:
    reading = [task for task in tasks if _takes(task, "data")]
    if request.data is None and reading:
        raise UsageError(f"{reading[0]} reads a file of yours: give --data FILE")
    if request.data is not None and not reading:
        raise UsageError(f"--data: {', '.join(tasks)} reads no file (squad and longbench do)")
    own = sorted({name for task in tasks for name in _options(task)})
    for name, value in request.options:
        if name not in own:
            raise unknown(f"--option of {', '.join(tasks)}:", name, own)
        for task in tasks:
            if name in _options(task):
                hint = get_type_hints(registry.load("tasks", task).samples)[name]
                checked(value, hint, f"--option {name}")


def cells(loaded: Loaded, request: Request) -> list[Cell]:
    """Every cell with its samples, so that a request that cannot be met ends before any work."""
    vocabulary = loaded.model.config.get_text_config().vocab_size
    tokenizer = loaded.tokenizer()
    return [draw(one, tokenizer) for one in probes(request, vocabulary, loaded.trained_length)]


def probes(request: Request, vocabulary: int, trained: int | None) -> list[Probe]:
    """The coordinates of every cell of a request, for a model of that vocabulary."""
    made = []
    for task in check(request):
        pairs = _default(task, "pairs") if request.pairs is None else request.pairs
        fixed = {
            "count": _count(request, task),
            "seed": request.seed,
            "template": request.template or ("compact" if vocabulary < SMALL else "ruler"),
            "haystack": request.haystack,
            "pairs": pairs if _takes(task, "pairs") else None,
        }
        fixed["data"] = request.data if _takes(task, "data") else None
        fixed["options"] = tuple(pair for pair in request.options if pair[0] in _options(task))
        depths = request.depths if _placed(task) else ()
        for length in lengths(request.lengths, trained):
            made += [Probe(task, length, depth, **fixed) for depth in depths or (None,)]
    return made


def _count(request: Request, task: str) -> int:
    given = request.samples
    if isinstance(given, Mapping):
        given = {_task(name): count for name, count in given.items()}.get(task)
    return COUNTS.get(metric(task), COUNTS["accuracy"]) if given is None else given


def draw(probe: Probe, tokenizer: Tokenizer) -> Cell:
    """A cell with its samples."""
    fields = probe._asdict()
    options = dict(fields.pop("options"))
    some = task_samples(**fields, **options, tokenizer=tokenizer)
    return Cell(probe.task, probe.length, probe.depth, probe.pairs, some, probe)


def _task(name: str) -> str:
    known = [*registry.names("tasks"), *ALIASES]
    if name not in known:
        raise unknown("task", name, known)
    return ALIASES.get(name, name)


def _takes(task: str, option: str) -> bool:
    return option in signature(registry.load("tasks", task).samples).parameters


def _options(task: str) -> list[str]:
    """Names of what a task takes beyond what every task does."""
    common = set(signature(registry.load("tasks", "passkey").samples).parameters)
    own = signature(registry.load("tasks", task).samples).parameters
    return [name for name in own if name not in {*common, "pairs", "data"}]


def _placed(task: str) -> bool:
    """Whether a task has one needle to place: those without refuse a depth."""
    return not {"no_depth", "retrieve"} & vars(registry.load("tasks", task)).keys()


def _default(task: str, option: str) -> Any:
    parameters = signature(registry.load("tasks", task).samples).parameters
    return parameters[option].default if option in parameters else None


def compare(
    loaded: Loaded,
    todo: Iterable[Cell],
    *,
    base_only: bool = False,
    controls: bool = False,
    command: str = "",
    tick: Callable[[int], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """One row a cell as soon as it is done; `tick(tokens)` is told of every batch that was read."""
    tokenizer = loaded.tokenizer()
    said = {"command": command, "model_hash": loaded.checkpoint.content()}
    for cell in todo:
        started, finished = now(), counter(cell, tick)
        with paused(loaded.model) as model:
            base = run(model, tokenizer, cell.task, cell.samples, finished)
        more = {**said, "started": started}
        if base_only or not loaded.wrapped:
            found = dict.fromkeys(NAMES) if controls and not base_only else None
            yield row(loaded, cell, base, base, base_only, found, **more)
            continue
        done = run(loaded.model, tokenizer, cell.task, cell.samples, finished)
        found = controlled_by(loaded, tokenizer, cell, done, finished) if controls else None
        yield row(loaded, cell, base, done, False, found, **more)


def controlled_by(
    loaded: Loaded,
    tokenizer: Tokenizer,
    cell: Cell,
    done: Outcome,
    tick: Callable[[int], None],
    known: dict[str, Outcome] | None = None,
) -> dict[str, Outcome | None]:
    """The controls of a wrapped model on a cell; all None where no head is cached."""
    if not loaded.wrapped:
        return dict.fromkeys(NAMES)
    what = (loaded.model, tokenizer, loaded.config, cell.task, cell.samples)
    return outcomes(*what, done, tick, known)


def counter(cell: Cell, tick: Callable[[int], None]) -> Callable[[int], None]:
    """A count of samples passed on as tokens."""
    mean = cell.tokens / len(cell.samples)
    return lambda count: tick(round(count * mean))


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def passes(loaded: Loaded, base_only: bool, controls: bool = False) -> int:
    """How often every sample is read, at most."""
    if base_only or not loaded.wrapped:
        return 1
    return 2 + controls * len(NAMES)
