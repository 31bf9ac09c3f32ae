"""Tasks of lm-evaluation-harness (`lm-eval:NAME`) on base and retrofit, as rows of results."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from sys import stderr
from typing import Any, NamedTuple

from mcretrofit.compare import now
from mcretrofit.errors import RetrofitError, unknown
from mcretrofit.evaluate import Outcome
from mcretrofit.harness import HarnessLM
from mcretrofit.model import Loaded
from mcretrofit.pooling import LOWER
from mcretrofit.retrofit import paused
from mcretrofit.rows import Cell, Probe, row, verdict
from mcretrofit.tasks import Sample

PREFIX = "lm-eval:"


class Asked(NamedTuple):
    """What to run: names without the prefix, a folder of task files, documents of a task."""

    names: tuple[str, ...]
    include: Path | None = None
    limit: int | None = None
    seed: int = 42
    batch: int = 1


class Found(NamedTuple):
    """One metric of one task: the harness's own number, and one of each document where it has any."""

    score: float
    documents: list[float]
    higher: bool


def harness_rows(
    loaded: Loaded, asked: Asked, *, base_only: bool = False, **more: Any
) -> Iterator[dict[str, Any]]:
    """A row a metric, base and retrofit on the same documents.

    `score` is the harness's number; intervals and verdicts are those of documents, and missing where
    a metric is no mean over them (a corpus-level BLEU).
    """
    managers = {name: _manager(name, asked.include) for name in asked.names}
    for name, manager in managers.items():
        more = {**more, "started": now()}
        with paused(loaded.model):
            base = _run(loaded, name, manager, asked)
        done = base
        if loaded.wrapped and not base_only:
            done = _run(loaded, name, manager, asked)
        for key in base[0]:
            yield _row(loaded, key, base, done, asked, base_only, more)


def _manager(name: str, include: Path | None) -> Any:
    from lm_eval.tasks import TaskManager

    if include is not None:
        if not include.is_dir():
            raise RetrofitError(f"--include-path {include}: no such folder")
        # the harness's own thousands of tasks take seconds to list: only where they are needed
        own = TaskManager(include_path=str(include), include_defaults=False)
        if own.match_tasks([name]):
            return own
    manager = TaskManager(include_path=None if include is None else str(include))
    if not manager.match_tasks([name]):
        raise unknown("lm-eval task", name, _near(name, manager.all_tasks))
    return manager


def _near(name: str, known: list[str]) -> list[str]:
    from difflib import get_close_matches

    return get_close_matches(name, known, n=8, cutoff=0.4)


def _run(loaded: Loaded, name: str, manager: Any, asked: Asked) -> tuple[dict, Any, float]:
    """Every metric by (task, metric, filter), the model class that ran, and seconds."""
    from lm_eval import simple_evaluate

    model, started = HarnessLM(loaded, batch_size=asked.batch), time.monotonic()
    # it prints; stdout is for rows alone
    with redirect_stdout(stderr):
        told = simple_evaluate(
            model=model,
            tasks=[name],
            task_manager=manager,
            limit=asked.limit,
            bootstrap_iters=0,
            log_samples=True,
            random_seed=asked.seed,
            fewshot_random_seed=asked.seed,
        )
    return _metrics(told), model, time.monotonic() - started


def _metrics(told: dict[str, Any]) -> dict[tuple[str, str, str], Found]:
    found = {}
    for task, documents in told["samples"].items():
        for label, score in told["results"][task].items():
            metric, comma, chosen = label.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(score, (int, float)):
                continue
            each = [
                _number(metric, one.get(metric)) for one in documents if one["filter"] == chosen
            ]
            complete = [one for one in each if one is not None]
            higher = told["higher_is_better"].get(task, {}).get(metric, True)
            found[task, metric, chosen] = Found(
                float(score), complete if len(complete) == len(each) else [], bool(higher)
            )
    return found


def _number(metric: str, value: Any) -> float | None:
    """A document's own number; of a text its loss by what the metric divides it by."""
    if isinstance(value, (int, float)):
        return float(value)
    if metric in ("bits_per_byte", "byte_perplexity", "word_perplexity") and len(value or ()) == 2:
        loss = -value[0] / value[1]
        return loss / math.log(2) if metric == "bits_per_byte" else math.exp(loss)
    return None


def _row(
    loaded: Loaded,
    key: tuple[str, str, str],
    base: tuple[dict, Any, float],
    done: tuple[dict, Any, float],
    asked: Asked,
    base_only: bool,
    more: dict[str, Any],
) -> dict[str, Any]:
    task, metric, chosen = key
    before, after = base[0][key], done[0][key]
    known = bool(before.documents)
    first, last = (_outcome(one[0][key], one[1], one[2]) for one in (base, done))
    length, name = base[1].longest, f"{PREFIX}{task}"
    count = len(first.scores) if known else asked.limit or 1
    probe = Probe(name, length, None, count, asked.seed, "lm-eval", None, None)
    probe = probe._replace(options=(("metric", metric), ("filter", chosen)))
    sample = Sample("", (), length, 0, None, asked.seed, "lm-eval", dataset=task)
    cell = Cell(name, length, None, None, [sample] * count, probe)
    made = row(loaded, cell, first, last, base_only, None, metric, **more)
    made |= {"score": after.score, "base_score": before.score}
    if not known:
        made |= {"low": None, "high": None, "scores": [], "base_scores": []}
    if made["verdict"] != "base":
        made["verdict"] = _verdict(first, last, metric, before.higher) if known else "no interval"
    return made


def _outcome(found: Found, model: Any, seconds: float) -> Outcome:
    return Outcome(found.documents or [found.score], model.held, seconds)


def _verdict(base: Outcome, done: Outcome, metric: str, higher: bool) -> str:
    if metric in LOWER or higher:
        return verdict(base, done, metric)
    return verdict(done, base, metric)
