"""Rows of results: what was measured with its coordinates, and what follows from all of them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mcretrofit import __version__
from mcretrofit.config import CachingConfig
from mcretrofit.evaluate import Outcome, metric
from mcretrofit.pooling import LOWER
from mcretrofit.tasks import Sample

if TYPE_CHECKING:
    from mcretrofit.model import Loaded

SCHEMA = 1
DIGITS = 6  # of a sample's score
UNROUTED = "helps, but so do random segments"


class Probe(NamedTuple):
    """The coordinates of a cell: they decide its samples."""

    task: str
    length: int
    depth: float | None
    count: int
    seed: int
    template: str
    haystack: str | None
    pairs: int | None
    data: str | None = None
    options: tuple[tuple[str, Any], ...] = ()  # of the task's own


class Cell(NamedTuple):
    """The samples of one task at one length."""

    task: str
    length: int
    depth: float | None
    pairs: int | None
    samples: list[Sample]
    probe: Probe | None = None

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples)


def identity(
    model_hash: str,
    probe: Probe | None,
    config: CachingConfig | None = None,
    controls: bool = False,
) -> str:
    """A name for a row made of all that decides it; without `config` that of its base."""
    parts = {
        "schema": SCHEMA,
        "model": model_hash,
        "probe": None if probe is None else probe._asdict(),
        "files": [_content(x) for x in (probe.template, probe.haystack, probe.data)]
        if probe
        else [],
        "caching": None if config is None else asdict(config),
        "controls": controls,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _content(name: str | None) -> str | None:
    """A digest of the file or of the folder's texts that a probe names."""
    path = Path(name or "")
    if not name or not path.exists():
        return None
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def row(
    loaded: Loaded,
    cell: Cell,
    base: Outcome,
    done: Outcome,
    base_only: bool = False,
    controls: Mapping[str, Outcome | None] | None = None,
    kind: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A result with its coordinates; intervals are those of paired differences, 95 %.

    `controls` are outcomes on the same samples; `more` has the model's hash, command and start.
    """
    kind = metric(cell.task, cell.samples[0]) if kind is None else kind
    config = None if base_only else loaded.config
    said = None if config is None else asdict(config)
    hashed = more.get("model_hash", "")
    names = ("variant", "segment", "router", "init", "top_k", "heads", "margin")
    coordinates = {name: said[name] if said else None for name in names}
    low, high = _interval(done, base)
    return {
        "id": identity(hashed, cell.probe, config, controls is not None),
        "model": loaded.name,
        **coordinates,
        "variant": "base" if config is None else config.variant,
        "task": cell.task,
        "metric": kind,
        "length": cell.length,
        "score": done.mean,
        "base_score": base.mean,
        "low": low,
        "high": high,
        "verdict": "base" if config is None else judged(base, done, kind, controls or {}),
        "n": len(cell.samples),
        "seed": cell.samples[0].seed,
        "cache_bytes": done.cache_bytes,
        "seconds": round(done.seconds, 3),
        "base_seconds": round(base.seconds, 3),
        "base_prefill_seconds": round(base.prefill, 3),
        "base_step_seconds": round(base.step, 6),
        "prefill_ratio": _ratio(done.prefill, base.prefill),
        "decode_ratio": _ratio(done.step, base.step),
        "dialect": cell.samples[0].dialect,
        "depth": cell.depth,
        "pairs": cell.pairs,
        "dataset": cell.samples[0].dataset,
        "options": dict(cell.probe.options) if cell.probe else {},
        **_controls(base, controls),
        "by_position": [
            [start, end, _rounded(before), _rounded(after)]
            for (start, end, before), (_, _, after) in zip(base.windows, done.windows, strict=True)
        ],
        "caching": said,
        "version": __version__,
        "threads": torch.get_num_threads(),
        **more,
        "scores": [_rounded(x) for x in done.scores],
        "base_scores": [_rounded(x) for x in base.scores],
    }


def interval(differences: list[float]) -> tuple[float, float]:
    """95 % interval of the mean of paired differences (normal approximation)."""
    count = len(differences)
    mean = sum(differences) / count
    if count == 1:
        return -math.inf, math.inf
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / (count - 1) / count)
    return mean - 1.96 * spread, mean + 1.96 * spread


def verdict(base: Outcome, caching: Outcome, kind: str) -> str:
    """`helps`, `no effect` or `hurts`, by the paired interval (of text: also by .5 %)."""
    sign = -1.0 if kind in LOWER else 1.0
    low, high = interval([sign * (c - b) for b, c in zip(base.scores, caching.scores, strict=True)])
    slack = 0.005 * base.mean if kind in LOWER else 0.0
    gain = sign * (caching.mean - base.mean)
    if low > 0 and gain > slack:
        return "helps"
    return "hurts" if high < 0 and -gain > slack else "no effect"


def judged(
    base: Outcome, done: Outcome, kind: str, controls: Mapping[str, Outcome | None] = {}
) -> str:
    """The verdict; help that random segments give too is no merit of the router."""
    said, random = verdict(base, done, kind), controls.get("random")
    if said != "helps" or random is None:
        return said
    sign = -1.0 if kind in LOWER else 1.0
    apart = [sign * (d - r) for d, r in zip(done.scores, random.scores, strict=True)]
    return said if interval(apart)[0] > 0 else UNROUTED


def outcome(stored: Mapping[str, Any]) -> Outcome:
    """The base of a stored row, to pair others with."""
    windows = tuple((start, end, before) for start, end, before, _ in stored["by_position"])
    times = (stored.get("base_prefill_seconds", 0.0), stored.get("base_step_seconds", 0.0))
    return Outcome(stored["base_scores"], 0, stored["base_seconds"], windows, *times)


def recommendation(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """One line: `helps`, or `keep the base` with its reason; None where nothing was compared."""
    rows = [r for r in rows if r["verdict"] != "base"]
    if not rows:
        return None
    hurt = [_where(r) for r in rows if r["verdict"] == "hurts"]
    recall = [r for r in rows if r["metric"] not in LOWER]
    risen = [_where(r) for r in recall if r["verdict"] == "helps"]
    any_way = [_where(r) for r in recall if r["verdict"] == UNROUTED]
    if hurt:
        return f"keep the base: caching hurts {', '.join(hurt)}"
    if not risen and any_way:
        return f"keep the base: random segments help as much ({', '.join(any_way)})"
    if not risen:
        return f"keep the base: recall {'does not rise' if recall else 'was not measured'}"
    text = "" if len(recall) < len(rows) else "; text was not measured (--task perplexity)"
    return f"helps: recall rises ({', '.join(risen)}), nothing is hurt{text}"


def _where(found: Mapping[str, Any]) -> str:
    depth = "" if found.get("depth") is None else f", depth {found['depth']:g}"
    return f"{found['task']} at {found['length']}{depth}"


def _interval(done: Outcome, base: Outcome) -> tuple[float | None, float | None]:
    low, high = interval([d - b for d, b in zip(done.scores, base.scores, strict=True)])
    return (low, high) if math.isfinite(low) else (None, None)


def _controls(base: Outcome, found: Mapping[str, Outcome | None] | None) -> dict[str, Any]:
    if found is None:
        return {"controls": None, "control_intervals": None}
    scores = {name: None if one is None else one.mean for name, one in found.items()}
    spans = {n: None if one is None else list(_interval(one, base)) for n, one in found.items()}
    return {"controls": scores, "control_intervals": spans}


def _ratio(done: float, base: float) -> float | None:
    return round(done / base, 3) if done and base else None


def _rounded(value: float) -> float:
    return round(value, DIGITS)
