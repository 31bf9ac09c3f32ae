"""Cells one after the other in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from mcretrofit.executors._todo import PAUSE, Todo
from mcretrofit.worker import Setup, Worker


def check() -> None:
    """This process is always there."""


def execute(
    todo: Todo, setup: Setup, workers: int, tick: Callable[..., None]
) -> Iterator[dict[str, Any]]:
    """Rows as they are finished; `tick(tokens, text)` moves the progress on."""
    worker: Worker | None = None
    last = None
    while todo.left:
        task = todo.next(last)
        if task is None:
            time.sleep(PAUSE)
            continue
        if worker is None:
            worker = Worker(setup)
        how = "base" if task.caching is None else f"{task.caching.variant} {task.caching.segment}"
        tick(0, f"{task.probe.task} at {task.probe.length}, {how}")
        row = worker.measure(task, tick)
        last = task.caching or last
        todo.finish(task, row)
        yield row
