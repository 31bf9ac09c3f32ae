"""Rows of one setting on one probe as one measurement; bytes for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev
from typing import NamedTuple

from mcretrofit.results import Row

UNROUTED = "helps, but so do random segments"
# metrics of text, of which less is better
LOWER = frozenset({"bits_per_byte", "perplexity", "byte_perplexity", "word_perplexity"})


class Measured(NamedTuple):
    """One setting on one probe; the interval is that of the paired difference, 95 %."""

    score: float
    base: float
    low: float | None
    high: float | None
    verdict: str
    n: int


def pooled(rows: Sequence[Row]) -> Measured:
    """Rows of one setting on one probe (depths, seeds) as one; every sample weighs the same."""
    counts = [row.get("n") or 1 for row in rows]
    total = sum(counts)
    weights = [count / total for count in counts]
    score = sum(w * row["score"] for w, row in zip(weights, rows, strict=True))
    base = sum(w * _base(row) for w, row in zip(weights, rows, strict=True))
    if len(rows) == 1:
        row = rows[0]
        verdict = row.get("verdict") or "no effect"
        return Measured(score, base, row.get("low"), row.get("high"), verdict, total)
    half = _half(rows, weights)
    low, high = (None, None) if half is None else (score - base - half, score - base + half)
    verdict = _verdict(base, low, high, rows[0]["metric"])
    if verdict == "helps" and _by_chance(rows, base, low, high):
        verdict = UNROUTED
    return Measured(score, base, low, high, verdict, total)


def _half(rows: Sequence[Row], weights: Sequence[float]) -> float | None:
    """Half the interval: of all samples where they are known, else of the rows' own intervals."""
    if all(row.get("scores") and row.get("base_scores") for row in rows):
        both = [zip(row["scores"], row["base_scores"], strict=True) for row in rows]
        apart = [after - before for some in both for after, before in some]
        return 1.96 * stdev(apart) / math.sqrt(len(apart))
    if any(row.get("low") is None or row.get("high") is None for row in rows):
        return None
    halves = [w * (r["high"] - r["low"]) / 2 for w, r in zip(weights, rows, strict=True)]
    return math.hypot(*halves)


def _verdict(base: float, low: float | None, high: float | None, metric: str) -> str:
    """As `rows.verdict`: what is measured of text has to change by half a percent too."""
    if low is None or high is None:
        return "no effect"
    slack = 0.005 * base if metric in LOWER else 0.0
    gain = (low + high) / 2
    if metric in LOWER:
        low, high, gain = -high, -low, -gain
    if low > 0 and gain > slack:
        return "helps"
    return "hurts" if high < 0 and -gain > slack else "no effect"


def _base(row: Row) -> float:
    found = row.get("base_score")
    return row["score"] if found is None else found


def _by_chance(rows: Sequence[Row], base: float, low: float, high: float) -> bool:
    """Whether random segments lie within the interval, or beyond it."""
    random = controls(rows).get("random")
    if random is None:
        return False
    gain = random.score - base
    return gain <= high if rows[0]["metric"] in LOWER else gain >= low


def controls(rows: Sequence[Row]) -> dict[str, Measured]:
    """Each control that every row has, as a setting of its own without a verdict."""
    names = [n for n, s in (rows[0].get("controls") or {}).items() if s is not None] if rows else []
    made = {}
    for name in names:
        if all((row.get("controls") or {}).get(name) is not None for row in rows):
            made[name] = pooled([_instead(row, name) for row in rows])._replace(verdict="")
    return made


def _instead(row: Row, name: str) -> Row:
    """The row as if the control had been the setting."""
    low, high = (row.get("control_intervals") or {}).get(name) or (None, None)
    kept = {"n": row.get("n"), "metric": row["metric"], "base_score": row.get("base_score")}
    return {**kept, "score": row["controls"][name], "low": low, "high": high}


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
