"""What is left of a plan in a run folder that other processes may be working on too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mcretrofit.config import CachingConfig
from mcretrofit.controls import NAMES
from mcretrofit.ledger import Claim, Ledger
from mcretrofit.rows import Probe
from mcretrofit.sweep import Job, Plan
from mcretrofit.worker import Task

PAUSE = 0.2  # seconds before a look at what other processes have finished


class Todo:
    """Hands out tasks that it has claimed: a base first, then the settings that need it."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self.plan, self.ledger = plan, ledger
        self.pending: list[Job] = [job for job in plan.jobs if job.id not in ledger.rows]
        self.claims: dict[str, Claim] = {}
        self.elsewhere: Callable[[int], None] = lambda _: None

    @property
    def left(self) -> bool:
        """Whether a job is not finished, here or elsewhere."""
        self.ledger.refresh()
        done = [job for job in self.pending if job.id in self.ledger.rows]
        for job in done:
            self.pending.remove(job)
            self.elsewhere(tokens(job.probe, job.caching, self.plan.controls))
        return bool(self.pending)

    def next(self, last: CachingConfig | None = None) -> Task | None:
        """A task that nobody is at, one with the setting `last` if there is any; None: wait."""
        for job in sorted(self.pending, key=lambda job: job.caching != last):
            if job.id in self.ledger.rows:
                continue
            base = self.ledger.rows.get(job.base)
            name = job.id if base is not None else job.base
            claim = None if name in self.claims else self.ledger.claim(name)
            if claim is None:
                continue
            self.claims[name] = claim
            return Task(name, job.probe, None if base is None else job.caching, base)
        return None

    def finish(self, task: Task, row: dict[str, Any]) -> None:
        """Keep a row; the claim goes after it is on disk."""
        if row["id"] != task.id:
            raise AssertionError(f"the row {row['id']} is not that of {task.id}")
        self.ledger.append(row)
        self.pending = [job for job in self.pending if job.id != task.id]
        self.release(task)

    def release(self, task: Task) -> None:
        """Give a claim back, the task done or not."""
        claim = self.claims.pop(task.id, None)
        if claim is not None:
            claim.release()

    def close(self) -> None:
        """Give every claim back."""
        for claim in self.claims.values():
            claim.release()
        self.claims.clear()

    def tokens(self) -> int:
        """Tokens that are still to be read, at most."""
        bases = {job.base: job.probe for job in self.pending if job.base not in self.ledger.rows}
        jobs = [tokens(job.probe, job.caching, self.plan.controls) for job in self.pending]
        return sum(jobs) + sum(tokens(probe, None, False) for probe in bases.values())


def tokens(probe: Probe, caching: CachingConfig | None, controls: bool) -> int:
    """Tokens that a cell reads, at most: once, and once more for each control."""
    times = 1 if caching is None or not controls else 1 + len(NAMES)
    return probe.length * probe.count * times
