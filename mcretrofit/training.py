"""Train the gates of a wrapped model and nothing else: steps, checks on held-out text, resuming.

The data of a step hangs on the seed and the step alone, and a run's state is written whole: a run that
was killed goes on to the same losses, bit for bit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mcretrofit.errors import RetrofitError
from mcretrofit.heldout import Check, Judge
from mcretrofit.ranks import World
from mcretrofit.retrofit import mixers, paused
from mcretrofit.tensorfile import read_header, read_metadata, read_tensor, write_safetensors
from mcretrofit.tunedata import Feed, Row
from mcretrofit.tunelog import Log, refuse_other
from mcretrofit.tuning import Tuning

STATE = "state.safetensors"
NEAR = 1.05  # of the larger loss of base and untrained gates, inside the trained length
SCALARS = 20  # learning rates of a matrix
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Trained(NamedTuple):
    """The best gates that a check allowed, at which step, and the checks that say so."""

    gates: dict[str, Tensor]
    steps: int
    stopped: str
    base: Check
    start: Check
    best: Check


def gates(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained: every parameter of `*.mc.*`, all others being frozen."""
    found = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mc." in name)
        if ".mc." in name:
            found[name] = parameter
    return found


@torch.no_grad()
def begin_(trained: Mapping[str, nn.Parameter], seed: int) -> None:
    """Gates that compute nothing: only the projection down to a low rank is not zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in trained.items():
        parameter.zero_()
        if name.endswith(".down"):
            start = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(start / math.sqrt(parameter.shape[1]))


def rate(step: int, tuning: Tuning) -> float:
    """Learning rate: linear warm-up, then a cosine to a twentieth."""
    if step < tuning.warmup:
        return tuning.lr * (step + 1) / tuning.warmup
    done = (step - tuning.warmup) / max(1, tuning.steps - tuning.warmup)
    return tuning.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


class Trainer:
    """One run: its gates, optimiser, log and state on disk."""

    def __init__(
        self, model: nn.Module, tuning: Tuning, run: Path, fixed: dict[str, Any], world: World
    ) -> None:
        self.model, self.tuning, self.run, self.fixed, self.world = model, tuning, run, fixed, world
        self.gates = gates(model)
        begin_(self.gates, tuning.seed)
        # a bias and a temperature are logits, the entries of a matrix add up to a question's length
        scalars = [p for p in self.gates.values() if p.dim() == 1]
        matrices = [p for p in self.gates.values() if p.dim() == 2]
        groups = [{"params": matrices, "scale": 1.0}, {"params": scalars, "scale": SCALARS}]
        self.adam = torch.optim.AdamW(groups, tuning.lr, betas=(0.9, 0.95), weight_decay=0)
        self.step, self.seconds, self.stopped = 0, 0.0, ""
        self.checks: dict[str, Check] = {}
        self.best = {name: p.detach().clone() for name, p in self.gates.items()}
        self.resume()
        self.log = Log(run, begun=bool(self.checks))

    def train(
        self, feed: Feed, held: Judge, length: int, tick: Callable[[int, dict], None]
    ) -> Trained:
        """From where the run was left to its end."""
        started = time.monotonic() - self.seconds
        if not self.checks:
            self._first(held)
        with _checkpointed(self.model) if self.tuning.checkpointing else nullcontext():
            while not self.stopped:
                row = self._step(feed, length)
                (self.seconds,) = self.world.agreed([time.monotonic() - started])
                row["seconds"] = round(self.seconds, 1)
                self._told("train", row)
                tick(self.step, row)
                if self.step % self.tuning.check_every == 0 or self.step == self.tuning.steps:
                    self._checked(held, tick)
                if self.step >= self.tuning.steps:
                    self.stopped = self.stopped or "all steps done"
                elif self.seconds > 60 * self.tuning.minutes:
                    self.stopped = self.stopped or f"{self.tuning.minutes:g} minutes used"
                if self.stopped or self.step % self.tuning.keep_every == 0:
                    self.keep()
        return Trained(self.best, self.step, self.stopped, **self.checks)

    def put_(self, gates: Mapping[str, Tensor] | None) -> None:
        """Gates into the model; the untrained ones where there are none."""
        begin_(self.gates, self.tuning.seed)
        with torch.no_grad():
            for name, value in (gates or {}).items():
                self.gates[name].copy_(value)

    def _first(self, held: Judge) -> None:
        """The base's losses, and the untrained gates'; a base that recalls nothing is refused."""
        with paused(self.model):
            base = held.check(self.model, -1, self.world)
        least = self.tuning.least_recall
        if base.near_right < least:
            raise RetrofitError(
                f"data without recall: the base answers {base.near_right:.0%} of the planted facts "
                f"inside its trained length (needed: {least:.0%}); a gate chooses what is read and "
                "cannot teach recall: keep the base"
            )
        start = held.check(self.model, 0, self.world)
        self.checks = {"base": base, "start": start, "best": start}
        # what the rows of the log belong to, before there is one
        self.keep()
        for check in (base, start):
            self._told("check", check._asdict())

    def _step(self, feed: Feed, length: int) -> dict[str, Any]:
        tuning, world = self.tuning, self.world
        pace = rate(self.step, tuning)
        for group in self.adam.param_groups:
            group["lr"] = pace * group["scale"]
        self.adam.zero_grad(set_to_none=False)
        sums = torch.zeros(4)
        for i in range(tuning.accumulate):
            number = (self.step * tuning.accumulate + i) * world.size + world.rank
            row = feed.row(number, length, tuning.mix)
            loss, told = _loss(self.model, row)
            (loss / tuning.accumulate).backward()
            sums += told
        world.mean_([*(p.grad for p in self.gates.values() if p.grad is not None), sums])
        norm = nn.utils.clip_grad_norm_(self.gates.values(), 1.0).item()
        if not math.isfinite(norm):
            raise RetrofitError(f"step {self.step + 1}: the gradient is not finite; lower --lr")
        self.adam.step()
        self.step += 1
        loss, prose, answers, asked = (sums / tuning.accumulate).tolist()
        answers = answers / asked if asked else None
        return {"step": self.step, "loss": loss, "prose": prose, "answers": answers, "lr": pace}

    def _checked(self, held: Judge, tick: Callable[[int, dict], None]) -> None:
        found, base = held.check(self.model, self.step, self.world), self.checks["base"]
        self._told("check", found._asdict())
        tick(self.step, {"check": found})
        near = max(base.near, self.checks["start"].near) * NEAR
        if found.prose > base.prose * (1 + self.tuning.prose_limit):
            self.stopped = (
                f"prose at step {self.step} is {found.prose / base.prose - 1:.2%} above the base's"
            )
        elif found.answers < self.checks["best"].answers and found.near <= near:
            self.checks["best"] = found
            self.best = {name: p.detach().clone() for name, p in self.gates.items()}

    def _told(self, kind: str, row: dict[str, Any]) -> None:
        if self.world.first:
            self.log.append(kind, row)

    def keep(self) -> None:
        """Write the state, wholly or not at all."""
        if not self.world.first:
            return
        tensors = {f"gate/{name}": p for name, p in self.gates.items()}
        tensors |= {f"best/{name}": p for name, p in self.best.items()}
        for name, p in self.gates.items():
            tensors |= {f"{m}/{name}": self.adam.state[p][m] for m in MOMENTS if self.adam.state[p]}
        said = {"step": self.step, "seconds": self.seconds, "stopped": self.stopped}
        said |= {"checks": self.checks, "fixed": self.fixed}
        write_safetensors(self.run / STATE, tensors, {"tune": json.dumps(said)})

    @torch.no_grad()
    def resume(self) -> None:
        """Go on from the state on disk, if there is one; raises naming what differs."""
        path = self.run / STATE
        if not path.is_file():
            return
        said = json.loads(read_metadata(path)["tune"])
        refuse_other(self.run, said["fixed"], self.fixed)
        tensors = {name: read_tensor(info) for name, info in read_header(path).items()}
        for name, p in self.gates.items():
            p.copy_(tensors[f"gate/{name}"])
            self.best[name] = tensors[f"best/{name}"].to(p.device)
            self.adam.state[p] = {
                m: tensors[f"{m}/{name}"].to("cpu" if m == "step" else p.device)
                for m in MOMENTS
                if f"{m}/{name}" in tensors
            }
        self.step, self.seconds, self.stopped = said["step"], said["seconds"], said["stopped"]
        self.checks = {name: Check(*check) for name, check in said["checks"].items()}


def _loss(model: nn.Module, row: Row) -> tuple[Tensor, Tensor]:
    """The weighted loss; for the log also prose and answers, and whether anything was asked."""
    ids = torch.tensor([row.ids], device=model.device)
    weights = torch.tensor(row.weights[1:], device=model.device)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0].float()
    each = F.cross_entropy(logits, ids[0, 1:], reduction="none")
    loss = (each * weights).sum() / weights.sum()
    spoken, plain = each.detach(), weights == 1.0
    asked = torch.zeros_like(plain)
    for start, stop in row.answers:
        asked[start - 1 : stop - 1] = True
    answers = spoken[asked].mean() if row.answers else spoken.new_zeros(())
    parts = (loss.detach(), spoken[plain & ~asked].mean(), answers)
    return loss, torch.tensor([*map(float, parts), float(bool(row.answers))])


@contextmanager
def _checkpointed(model: nn.Module) -> Iterator[None]:
    """Blocks that hold a mixer forget what they computed, and compute it again going back."""
    found = [model.get_submodule(one.name.rpartition(".")[0] or one.name) for one in mixers(model)]
    for block in found:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in found:
            del block.forward
