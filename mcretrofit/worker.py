"""A worker of a sweep: a model loaded once, and any cell of the plan measured on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mcretrofit.compare import controlled_by, counter, draw, now
from mcretrofit.config import CachingConfig
from mcretrofit.controls import shared
from mcretrofit.evaluate import Outcome, run
from mcretrofit.model import Loaded, attach, load
from mcretrofit.retrofit import paused, plans, retrofit_, revert_
from mcretrofit.rows import Cell, Probe, outcome, row
from mcretrofit.sweep import Traits, canonical, command
from mcretrofit.wrapped import load_gates

DRAWN = 64  # cells whose samples are kept


class Setup(NamedTuple):
    """What a worker is made of; it travels to other machines."""

    model: str
    traits: Traits
    controls: bool
    device: str = "cpu"
    config: str | None = None
    threads: int | None = None


class Task(NamedTuple):
    """One cell: the unmodified model where `caching` is None, else a setting beside its base's row."""

    id: str
    probe: Probe
    caching: CachingConfig | None = None
    base: dict[str, Any] | None = None


class Worker:
    """Holds the model; wraps it anew only where the setting changes."""

    def __init__(self, setup: Setup) -> None:
        import torch

        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        self.setup = setup
        found = load(setup.model, config=setup.config, device=setup.device)
        self.gates = {
            f"{name}.mc.{own}": value.detach().clone()
            for name, plan in plans(found.model).items()
            for own, value in plan.gate.named_parameters()
        }
        revert_(found.model)
        # under the name that the rows go by
        self.bare = found._replace(name=setup.traits.name, config=None, covers=None)
        self.kept = found
        self.tokenizer = found.tokenizer()
        self.wrapped: Loaded | None = None
        self.cells: dict[Probe, Cell] = {}
        self.shared: dict[tuple[CachingConfig, Probe], dict[str, Outcome]] = {}

    def cell(self, probe: Probe) -> Cell:
        """The samples of a probe; raises `UsageError` where they cannot be made."""
        if probe not in self.cells:
            if len(self.cells) >= DRAWN:
                self.cells.pop(next(iter(self.cells)))
            self.cells[probe] = draw(probe, self.tokenizer)
        return self.cells[probe]

    def measure(self, task: Task, tick: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
        """The row of a task."""
        cell, started = self.cell(task.probe), now()
        read = counter(cell, tick)
        said = {
            "model_hash": self.setup.traits.model_hash,
            "command": command(
                self.setup.traits.name, task.caching, task.probe, self.setup.controls
            ),
            "started": started,
        }
        if task.caching is None:
            with paused(self.bare.model) as model:
                base = run(model, self.tokenizer, cell.task, cell.samples, read)
            return row(self.bare, cell, base, base, True, **said)
        base, wrapped = outcome(task.base or {}), self._wrapped(task.caching)
        done = base._replace(cache_bytes=0)
        if wrapped.wrapped:
            done = run(wrapped.model, self.tokenizer, cell.task, cell.samples, read)
        found = None
        if self.setup.controls:
            known = self.shared.setdefault((shared(task.caching), task.probe), {})
            found = controlled_by(wrapped, self.tokenizer, cell, done, read, known)
        return row(wrapped, cell, base, done, False, found, **said)

    def _wrapped(self, caching: CachingConfig) -> Loaded:
        if self.wrapped is None or self.wrapped.config != caching:
            revert_(self.bare.model)
            self.wrapped = self._as_kept(caching) or attach(self.bare, caching)
        return self.wrapped

    def _as_kept(self, caching: CachingConfig) -> Loaded | None:
        """A wrapped folder's own setting, with what was measured and trained for it."""
        kept = self.kept
        if kept.covers is None or canonical(kept.config) != caching:
            return None
        if kept.wrapped:
            retrofit_(self.bare.model, kept.config, kept.covers)
            load_gates(self.bare.model, self.gates)
        return self.bare._replace(config=caching, covers=kept.covers)
