"""Cells on the workers of a Ray cluster, one a task; a model is loaded once a worker.

`RAY_ADDRESS` names the cluster; without it a local one is started. A task whose worker dies or
fails is given out anew, `RETRIES` times.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from mcretrofit.errors import RetrofitError
from mcretrofit.executors._todo import PAUSE, Todo, tokens
from mcretrofit.worker import Setup, Task, Worker

RETRIES = 2


def execute(
    todo: Todo, setup: Setup, workers: int, tick: Callable[..., None]
) -> Iterator[dict[str, Any]]:
    """Rows as they are finished; only this process writes to the run folder."""
    ray = check()
    ours = not ray.is_initialized()
    if ours:
        _start(ray, workers)
    gpus = 1 if setup.device.startswith("cuda") else 0
    # a worker that died comes back by itself and loads the model again
    actor = ray.remote(Worker).options(num_cpus=1, num_gpus=gpus, max_restarts=-1)
    idle: list[tuple[Any, Any]] = [(actor.remote(setup), None) for _ in range(workers)]
    running: dict[Any, tuple[Task, Any]] = {}
    failed: Counter[str] = Counter()
    try:
        while todo.left or running:
            while idle and (task := todo.next(idle[-1][1])) is not None:
                hand, _ = idle.pop()
                running[hand.measure.remote(task)] = task, hand
            if not running:
                time.sleep(PAUSE)
                continue
            ready, _ = ray.wait(list(running), num_returns=1, timeout=5 * PAUSE)
            for done in ready:
                task, hand = running.pop(done)
                idle.append((hand, task.caching))
                row = _result(ray, done, task, failed)
                if row is None:
                    todo.release(task)
                    continue
                todo.finish(task, row)
                tick(tokens(task.probe, task.caching, setup.controls))
                yield row
    finally:
        if ours:
            ray.shutdown()


def check() -> Any:
    """The library itself, where it is installed."""
    try:
        import ray
    except ImportError as error:
        raise RetrofitError(
            "--executor ray needs Ray, which is not installed: pip install 'mcretrofit[ray]'"
        ) from error
    return ray


def _start(ray: Any, workers: int) -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    address = os.environ.get("RAY_ADDRESS")
    size = {} if address else {"num_cpus": workers}
    for left in reversed(range(RETRIES + 1)):
        try:
            ray.init(address=address, **size, **quiet)
            return
        except Exception as error:
            # Ray raises bare Exception where a node is not up in 30 s, as on a busy machine
            ray.shutdown()
            if not left:
                where = f"the cluster {address}" if address else "a local cluster"
                reason = " ".join(str(error).split())
                raise RetrofitError(f"--executor ray: {where} did not start: {reason}") from error


def _result(ray: Any, done: Any, task: Task, failed: Counter[str]) -> dict[str, Any] | None:
    """The row; None where the task is to be tried again."""
    try:
        return ray.get(done)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RetrofitError):
            # the request itself is wrong: no other worker would do better
            raise cause from error
        failed[task.id] += 1
        if failed[task.id] <= RETRIES:
            return None
        line = str(error).strip().splitlines()[-1]
        raise RetrofitError(
            f"{task.probe.task} at {task.probe.length} failed {failed[task.id]} times: {line}"
        ) from error
