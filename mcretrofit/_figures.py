"""Which charts a table of results calls for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mcretrofit import _charts as charts
from mcretrofit._tables import RATIOS, Table, at, largest
from mcretrofit.pooling import LOWER, pooled
from mcretrofit.results import Row, setting

MOST = 24  # heat maps of one table
COSTS = ("cache_bytes", *RATIOS)
ACROSS = {
    "cache_bytes": "cache (bytes, logarithmic)",
    "prefill_ratio": "prefill time (times the base)",
    "decode_ratio": "decode time (times the base)",
}


class Figure(NamedTuple):
    """Charts that belong together; `note` says what they leave out."""

    title: str
    charts: list[str]
    note: str = ""


def figures(table: Table, known: dict[str, str], chosen: str | None) -> list[Figure]:
    """`known`: labels by setting; `chosen`: the key of the recommended one."""
    if table.metric in LOWER:
        return _by_position(table, known, chosen)
    return [*_heat_maps(table, known, chosen), *_costs(table, known, chosen)]


def _ranked(known: dict[str, str], chosen: str | None) -> list[str]:
    return sorted(known, key=lambda key: key != chosen)


def _heat_maps(table: Table, known: dict[str, str], chosen: str | None) -> list[Figure]:
    depths = sorted({row["depth"] for row in table.rows if row.get("depth") is not None})
    if len(depths) < 2:
        return []
    rows = [row for row in table.rows if row.get("depth") is not None]
    compared = [row for row in rows if setting(row)]
    values = [row["score"] for row in rows] + [r.get("base_score") or 0.0 for r in compared]
    span = (0.0, 1.0) if min(values) >= 0 and max(values) <= 1 else (min(values), max(values))
    shown = [k for k in _ranked(known, chosen) if any(setting(row) == k for row in rows)]
    made = [charts.scale(span, f"{table.measure}, all maps")]

    def grid(some: Sequence[Row], base: bool) -> list[list[float | None]]:
        found = [
            [[r for r in at(some, n) if r["depth"] == d] for n in table.lengths] for d in depths
        ]
        return [[_score(cell, base) for cell in line] for line in found]

    made.append(charts.heat("base", table.lengths, depths, grid(rows, True), span))
    for key in shown[:MOST]:
        own = [row for row in rows if setting(row) == key]
        made.append(charts.heat(known[key], table.lengths, depths, grid(own, False), span))
    left = len(shown) - MOST
    note = f"{left} more settings are in the tables only." if left > 0 else ""
    return [Figure(f"{table.title}: {table.measure} by length and depth", made, note)]


def _score(rows: Sequence[Row], base: bool) -> float | None:
    if not rows:
        return None
    # the base of a cell is the same beside every setting: one row tells it
    return pooled(rows[:1]).base if base else pooled(rows).score


def _costs(table: Table, known: dict[str, str], chosen: str | None) -> list[Figure]:
    longest = table.lengths[-1]
    rows = at(table.rows, longest)
    base = table.lines[0].entries[-1]
    made = []
    for cost in COSTS:
        points = [charts.Point("base", None, base.score)] if base else []
        for key, label in known.items():
            own = [row for row in rows if setting(row) == key]
            held = largest(own, cost)
            if held:
                points.append(charts.Point(label, held, pooled(own).score, key == chosen))
        if any(point.x for point in points):
            up = f"{table.measure} at {longest:,} tokens"
            made.append(charts.pareto(points, ACROSS[cost], up, cost == "cache_bytes"))
    title = f"{table.title}: {table.measure} against cost"
    note = "The line is the frontier; open dots are beaten at the same or a lower cost."
    return [Figure(title, made, note)] if made else []


def _by_position(table: Table, known: dict[str, str], chosen: str | None) -> list[Figure]:
    rows = [row for row in table.rows if row.get("by_position") and setting(row)]
    if not rows:
        rows = [row for row in table.rows if row.get("by_position")]
    if not rows:
        return []
    longest = max(row["length"] for row in rows)
    first = {setting(row): row for row in reversed(at(rows, longest))}
    named = _named(first, chosen)
    lines = [_curve("base", next(iter(first.values())), 2, 0)]
    apart = []
    for key, row in first.items():
        if not key:
            continue
        rank = named.index(key) + (1 if named[0] == chosen else 2) if key in named else None
        lines.append(_curve(known[key], row, 3, rank))
        windows = [(s, e, 100 * (own / base - 1)) for s, e, base, own in row["by_position"]]
        apart.append(charts.Curve(known[key], windows, rank))
    made = [charts.curves(lines, table.measure)]
    if apart:
        made.append(charts.curves(apart, f"{table.measure}, % above base", "base"))
    grey = len(apart) - len(named)
    note = f"Grey: {grey} more settings, whose numbers are in the table." if grey > 0 else ""
    return [Figure(f"{table.title}: {table.measure} by position, {longest:,} tokens", made, note)]


def _curve(label: str, row: Row, column: int, rank: int | None) -> charts.Curve:
    windows = [(window[0], window[1], window[column]) for window in row["by_position"]]
    return charts.Curve(label, windows, rank)


def _named(rows: dict[str, Row], chosen: str | None) -> list[str]:
    """The recommended setting, then those farthest from the base in either direction: four."""
    order = sorted((k for k in rows if k), key=lambda k: rows[k]["score"] - _base(rows[k]))
    ends = [*order[:2], *order[-2:]] if len(order) > 4 else order
    first = [chosen] if chosen in rows else []
    return list(dict.fromkeys([*first, *ends]))[:4]


def _base(row: Row) -> float:
    return pooled([row]).base
