"""The losses of a training run: `losses.jsonl`, append-only, and their curve as a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcretrofit.errors import RetrofitError, UsageError

NAME, PICTURE = "losses.jsonl", "losses.png"


class Log:
    """Rows of a run; a step that was written before a kill is not written again.

    Raises `UsageError` for the rows of another run: where this one has not `begun`, there are none.
    """

    def __init__(self, folder: Path, begun: bool = True) -> None:
        self.path = folder / NAME
        if not begun and self.path.is_file():
            raise UsageError(
                f"{self.path} is of a run whose state is gone: give another --run, or delete it"
            )
        self.last = {"train": 0, "check": -2}
        for row in read(self.path):
            self.last[row["kind"]] = max(self.last[row["kind"]], row["step"])
        torn = self.path.is_file() and not self.path.read_bytes().endswith((b"\n",))
        if torn and self.path.stat().st_size:
            self._write(b"\n")

    def append(self, kind: str, row: Mapping[str, Any]) -> None:
        """A row of the kind `train` or `check`, synced."""
        if row["step"] > self.last[kind]:
            self._write(json.dumps({"kind": kind, **row}).encode() + b"\n")
            self.last[kind] = row["step"]

    def _write(self, line: bytes) -> None:
        try:
            with self.path.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RetrofitError(f"cannot write {self.path}: {error.strerror}") from error


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole row; a line that a kill tore is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("kind") in ("train", "check"):
            rows.append(row)
    return rows


def refuse_other(run: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """One line for the first thing that a run was started with and that is another now."""
    now = json.loads(json.dumps(now))
    for name in now:
        if then.get(name) != now[name]:
            raise UsageError(
                f"{run} was started with {name} {then.get(name)!r}, not {now[name]!r}: "
                "go on as it began, give another --run, or delete it"
            )


def draw(folder: Path) -> str | None:
    """Draw `losses.png`; the reason why not, where that is so."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return f"{PICTURE} was left out: matplotlib is not installed (the extra `report` has it)"
    rows = read(folder / NAME)
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="nats a token")
    for what, colour in (("answers", "C0"), ("prose", "C1")):
        for kind, look in (("train", {"lw": 0.7, "alpha": 0.5}), ("check", {"marker": "o"})):
            some = [(r["step"], r[what]) for r in rows if r["kind"] == kind and r[what] is not None]
            base = [loss for step, loss in some if step < 0]
            some = [pair for pair in some if pair[0] >= 0]
            if base:
                axes.axhline(base[0], color=colour, linestyle=":", label=f"{what}, base")
            if some:
                label = f"{what}, {'held out' if kind == 'check' else 'training'}"
                axes.plot(*zip(*some, strict=True), color=colour, label=label, **look)
    axes.legend()
    work = folder / f".{PICTURE}.new.png"
    figure.savefig(work, dpi=120)
    work.replace(folder / PICTURE)
    return None
