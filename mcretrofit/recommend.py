"""Which setting to use, or to keep the base, and why: one line from the rows of one model.

The cheapest setting (cache bytes, then prefill ratio) within one interval of the best recall, among
those that raise recall somewhere and hurt nothing that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mcretrofit.pooling import LOWER, UNROUTED, Measured, pooled, size
from mcretrofit.results import Row, caching, cell, labels, probe, setting

MOST = 3  # places that a line names


class Recommendation(NamedTuple):
    """`setting`: the caching fields to wrap with, None where the base is to be kept."""

    setting: dict[str, Any] | None
    reason: str
    label: str = ""

    @property
    def line(self) -> str:
        return f"use {self.label}: {self.reason}" if self.label else f"keep the base: {self.reason}"


class _Candidate(NamedTuple):
    label: str
    rows: list[Row]
    hurt: list[str]
    risen: list[str]
    chance: list[str]
    recall: Measured | None

    @property
    def gain(self) -> float:
        return self.recall.score - self.recall.base if self.recall else 0.0

    @property
    def raises(self) -> bool:
        return bool(self.risen) and self.gain > 0

    @property
    def price(self) -> tuple[float, float, float]:
        held = (row.get("cache_bytes") for row in self.rows)
        ratio = (row.get("prefill_ratio") for row in self.rows)
        return _largest(held), _largest(ratio), -self.gain


def recommend(rows: Iterable[Row]) -> Recommendation:
    """Judge the settings that were measured on every cell; rows of `base` alone are no reason."""
    rows = [row for row in rows if setting(row)]
    if not rows:
        return Recommendation(None, "nothing was compared with it")
    names, cells = labels(rows), {cell(row) for row in rows}
    groups = {key: [row for row in rows if setting(row) == key] for key in names}
    whole = {key: some for key, some in groups.items() if {cell(r) for r in some} == cells}
    if not whole:
        return Recommendation(None, "no setting was measured on every probe and length")
    found = [_candidate(names[key], some) for key, some in whole.items()]
    left = len(groups) - len(whole)
    partly = f"; left out: {left} not measured on every probe and length" if left else ""
    safe = [one for one in found if not one.hurt]
    good = [one for one in safe if one.raises]
    if not good:
        return Recommendation(None, _why_not(found, safe) + partly)
    best = max(good, key=lambda one: one.gain)
    low = best.recall.low if best.recall and best.recall.low is not None else best.gain
    near = [one for one in good if one is best or one.gain >= low]
    chosen = min(near, key=lambda one: one.price)
    return Recommendation(caching(chosen.rows[0]), _why(chosen, len(near)) + partly, chosen.label)


def _candidate(label: str, rows: list[Row]) -> _Candidate:
    recall = [row for row in rows if row["metric"] not in LOWER]
    places: dict[tuple, list[Row]] = {}
    for row in rows:
        places.setdefault((probe(row), row["length"]), []).append(row)
    hurt, risen, chance = [], [], []
    for some in places.values():
        place = f"{some[0]['task']} at {some[0]['length']}"
        verdict = pooled(some).verdict
        # what hurts at one depth hurts, also where the mean over depths does not show it
        worse = [r for r in some if r.get("verdict") == "hurts"]
        if verdict == "hurts":
            hurt.append(place)
        elif worse:
            hurt += [f"{place}, depth {_depth(row)}" for row in worse]
        elif some[0]["metric"] not in LOWER:
            risen += [place] if verdict == "helps" else []
            chance += [place] if verdict == UNROUTED else []
    return _Candidate(label, rows, hurt, risen, chance, pooled(recall) if recall else None)


def _depth(row: Row) -> str:
    return "unknown" if row.get("depth") is None else f"{row['depth']:g}"


def _why(one: _Candidate, near: int) -> str:
    assert one.recall is not None
    text = "" if any(row["metric"] in LOWER for row in one.rows) else _UNREAD
    reason = f"recall rises ({_few(one.risen)}), nothing is hurt{text}"
    reason += f"; mean recall {one.recall.base:.3f} to {one.recall.score:.3f}"
    if math.isfinite(one.price[0]):
        reason += f" for {size(one.price[0])} of cache"
    if near > 1:
        reason += f", the cheapest of {near} settings within one interval of the best"
    return reason


_UNREAD = "; text was not measured (--task perplexity)"


def _why_not(found: Sequence[_Candidate], safe: Sequence[_Candidate]) -> str:
    if all(one.recall is None for one in found) and safe:
        return "recall was not measured"
    if safe and not any(one.raises for one in found):
        chance = [p for one in safe for p in one.chance]
        places = _few(list(dict.fromkeys(chance)))
        return f"random segments help as much ({places})" if chance else "recall does not rise"
    if len(found) == 1:
        return f"caching hurts {_few(found[0].hurt)}"
    hurt = [f"{one.label} {_few(one.hurt)}" for one in found if one.hurt]
    which = "every setting hurts something" if not safe else "what raises recall hurts something"
    return f"{which}: {_few(hurt, '; ')}"


def _few(places: Sequence[str], comma: str = ", ") -> str:
    more = len(places) - MOST
    return comma.join([*places[:MOST], *([f"and {more} more"] if more > 0 else [])])


def _largest(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return max(known) if known else math.inf
