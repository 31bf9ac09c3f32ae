"""Base against retrofit on the same samples: one row for each task and length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

from mcretrofit import registry
from mcretrofit.errors import UsageError, unknown
from mcretrofit.evaluate import Outcome, interval, metric, run, task_samples, verdict
from mcretrofit.model import Loaded
from mcretrofit.retrofit import paused
from mcretrofit.tasks import ALIASES, Sample

COUNTS = {"accuracy": 32, "bits_per_byte": 8}  # samples unless said
SMALL = 8192  # vocabularies below it get the compact dialect


@dataclass(frozen=True)
class Request:
    """What to measure; None takes the default of the task, the model or its tokenizer."""

    tasks: tuple[str, ...]
    lengths: tuple[str, ...] = ()  # tokens (`512`, `4k`) or times the trained length (`2x`)
    samples: int | None = None
    seed: int = 42
    depth: float | None = None
    template: str | None = None
    haystack: str | None = None
    pairs: int | None = None


class Cell(NamedTuple):
    """The samples of one task at one length."""

    task: str
    length: int
    depth: float | None
    pairs: int | None
    samples: list[Sample]

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples)


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
    if request.samples is not None and request.samples < 1:
        raise UsageError(f"--samples {request.samples}: has to be at least 1")
    lengths(request.lengths, 1)
    return tasks


def cells(loaded: Loaded, request: Request) -> list[Cell]:
    """Every cell with its samples, so that a request that cannot be met ends before any work."""
    tasks = check(request)
    tokenizer = loaded.tokenizer()
    small = loaded.model.config.get_text_config().vocab_size < SMALL
    made = []
    for task in tasks:
        pairs = _default(task, "pairs") if request.pairs is None else request.pairs
        pairs = pairs if _takes(task, "pairs") else None
        for length in lengths(request.lengths, loaded.trained_length):
            some = task_samples(
                task,
                length=length,
                depth=request.depth,
                count=COUNTS[metric(task)] if request.samples is None else request.samples,
                seed=request.seed,
                tokenizer=tokenizer,
                template=request.template or ("compact" if small else "ruler"),
                haystack=request.haystack,
                pairs=pairs,
            )
            made.append(Cell(task, length, request.depth, pairs, some))
    return made


def _task(name: str) -> str:
    known = [*registry.names("tasks"), *ALIASES]
    if name not in known:
        raise unknown("task", name, known)
    return ALIASES.get(name, name)


def _takes(task: str, option: str) -> bool:
    return option in signature(registry.load("tasks", task).samples).parameters


def _default(task: str, option: str) -> Any:
    parameters = signature(registry.load("tasks", task).samples).parameters
    return parameters[option].default if option in parameters else None


def compare(
    loaded: Loaded,
    todo: Iterable[Cell],
    *,
    base_only: bool = False,
    tick: Callable[[int], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """One row a cell as soon as it is done; `tick(tokens)` is told of every batch that was read."""
    tokenizer = loaded.tokenizer()
    for cell in todo:
        mean = cell.tokens / len(cell.samples)

        def finished(count: int, mean: float = mean) -> None:
            tick(round(count * mean))

        with paused(loaded.model) as model:
            base = run(model, tokenizer, cell.task, cell.samples, finished)
        done = base
        if loaded.wrapped and not base_only:
            done = run(loaded.model, tokenizer, cell.task, cell.samples, finished)
        yield row(loaded, cell, base, done, base_only)


def passes(loaded: Loaded, base_only: bool) -> int:
    """How often every sample is read."""
    return 1 + (bool(loaded.wrapped) and not base_only)


def row(
    loaded: Loaded, cell: Cell, base: Outcome, done: Outcome, base_only: bool = False
) -> dict[str, Any]:
    """A result with its coordinates; the interval is that of the paired difference, 95 %."""
    kind, config = metric(cell.task), None if base_only else loaded.config
    low, high = interval([d - b for d, b in zip(done.scores, base.scores, strict=True)])
    known = math.isfinite(low)
    return {
        "model": loaded.name,
        "variant": "base" if config is None else config.variant,
        "segment": None if config is None else config.segment,
        "router": None if config is None else config.router,
        "init": None if config is None else config.init,
        "task": cell.task,
        "metric": kind,
        "length": cell.length,
        "score": done.mean,
        "base_score": base.mean,
        "low": low if known else None,
        "high": high if known else None,
        "verdict": "base" if config is None else verdict(base, done, kind),
        "n": len(cell.samples),
        "seed": cell.samples[0].seed,
        "cache_bytes": done.cache_bytes,
        "seconds": round(done.seconds, 3),
        "base_seconds": round(base.seconds, 3),
        "dialect": cell.samples[0].dialect,
        "depth": cell.depth,
        "pairs": cell.pairs,
    }


def recommendation(rows: list[Mapping[str, Any]]) -> str | None:
    """One line: `helps`, or `keep the base` with its reason; None where nothing was compared."""
    rows = [r for r in rows if r["verdict"] != "base"]
    if not rows:
        return None
    hurt = [_where(r) for r in rows if r["verdict"] == "hurts"]
    recall = [r for r in rows if r["metric"] == "accuracy"]
    risen = [_where(r) for r in recall if r["verdict"] == "helps"]
    if hurt:
        return f"keep the base: caching hurts {', '.join(hurt)}"
    if not risen:
        return f"keep the base: recall {'does not rise' if recall else 'was not measured'}"
    text = "" if len(recall) < len(rows) else "; text was not measured (--task perplexity)"
    return f"helps: recall rises ({', '.join(risen)}), nothing is hurt{text}"


def _where(row: Mapping[str, Any]) -> str:
    return f"{row['task']} at {row['length']}"
