"""Rows of results as tables: one for each model, task and dialect; lengths are columns.

The base comes first, then every setting with its controls. What a terminal, Markdown and HTML show
is the same table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mcretrofit.pooling import Measured, controls, pooled
from mcretrofit.results import Row, cell, labels, model, probe, setting

CONTROLS = {
    "random": "random segments",
    "recent": "most recent segments",
    "none": "no history",
    "oracle": "oracle segment",
}

VERDICTS = ("helps", "no effect", "hurts")


class Entry(NamedTuple):
    """One score; `share` says what it hides: `2 of 3 cells`, `hurts at depth 100`."""

    score: float
    low: float | None = None
    high: float | None = None
    verdict: str = ""
    share: str = ""

    @property
    def spread(self) -> str:
        """The interval of the difference to the base; nothing for the base itself and controls."""
        if self.low is None or self.high is None:
            return "interval unknown" if self.verdict else ""
        return f"{self.low:+.3f} .. {self.high:+.3f}"


class Line(NamedTuple):
    """`kind` is base, setting or control; an entry for each length, None where there is none."""

    label: str
    kind: str
    entries: list[Entry | None]


class Table(NamedTuple):
    """One probe, every setting; `rows` are those it was made of."""

    model: str
    task: str
    dialect: str
    metric: str
    detail: str
    lengths: list[int]
    lines: list[Line]
    rows: list[Row]

    @property
    def title(self) -> str:
        return f"{self.task} ({self.dialect} dialect{self.detail})"

    @property
    def measure(self) -> str:
        return self.metric.replace("_", " ")


class Cost(NamedTuple):
    """What a setting takes at its longest length; None where it was not recorded."""

    label: str
    length: int
    cache_bytes: float | None
    prefill_ratio: float | None
    decode_ratio: float | None
    verdicts: str


def models(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows by the name of their model; two models of one name get their hash beside it."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(model(row), []).append(row)
    names = [name for name, _ in groups]
    return {
        f"{name} {digest[:8]}".strip() if names.count(name) > 1 else name: some
        for (name, digest), some in groups.items()
    }


def tables(name: str, rows: Sequence[Row]) -> list[Table]:
    """The tables of one model."""
    known = labels(rows)
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(probe(row), []).append(row)
    return [_table(name, key, some, known) for key, some in groups.items()]


def _table(name: str, key: tuple, rows: list[Row], known: dict[str, str]) -> Table:
    task, dialect, metric, pairs, *more = key
    lengths = sorted({row["length"] for row in rows})
    lines = [Line("base", "base", [_base(at(rows, length)) for length in lengths])]
    for one, label in known.items():
        own = [row for row in rows if setting(row) == one]
        if own:
            lines += _setting(label, own, rows, lengths)
    words = [f"{pairs} pairs"] if pairs else []
    detail = "".join(f", {word}" for word in (*words, *more) if word not in (None, task, dialect))
    return Table(name, task, dialect or "unnamed", metric, detail, lengths, lines, rows)


def at(rows: Sequence[Row], length: int) -> list[Row]:
    """The rows of a length."""
    return [row for row in rows if row["length"] == length]


def _base(rows: list[Row]) -> Entry:
    """The unmodified model on every cell that was measured, each once."""
    once = {cell(row): row for row in sorted(rows, key=lambda row: row["variant"] == "base")}
    return Entry(pooled(list(once.values())).base)


def _setting(label: str, own: list[Row], rows: list[Row], lengths: list[int]) -> list[Line]:
    entries: list[Entry | None] = []
    for length in lengths:
        some = at(own, length)
        every = len({cell(row) for row in at(rows, length) if setting(row)})
        entries.append(_entry(pooled(some), _share(some, every)) if some else None)
    lines = [Line(label, "setting", entries)]
    checks = [controls(at(own, length)) for length in lengths]
    for name in sorted({name for one in checks for name in one}, key=_order):
        scores = [_entry(one[name], "") if name in one else None for one in checks]
        lines.append(Line(CONTROLS.get(name, name), "control", scores))
    return lines


def _share(some: list[Row], every: int) -> str:
    """What the mean over cells does not show: that some are missing, and where one of them hurts."""
    words = [f"{len(some)} of {every} cells"] if len(some) < every else []
    depths = [r.get("depth") for r in some if r.get("verdict") == "hurts"] if len(some) > 1 else []
    known = sorted({f"{depth:g}" for depth in depths if depth is not None}, key=float)
    return ", ".join([*words, *([f"hurts at depth {', '.join(known)}"] if known else [])])


def _entry(found: Measured, share: str) -> Entry:
    return Entry(found.score, found.low, found.high, found.verdict, share)


def _order(name: str) -> tuple[int, str]:
    known = list(CONTROLS)
    return (known.index(name) if name in known else len(known)), name


def costs(rows: Sequence[Row]) -> list[Cost]:
    """A line for each setting of one model, the cheapest cache first."""
    made = []
    for key, label in labels(rows).items():
        own = [row for row in rows if setting(row) == key]
        length = max(row["length"] for row in own)
        said = [row.get("verdict") for row in own]
        counts = {word: said.count(word) for word in dict.fromkeys((*VERDICTS, *said)) if word}
        verdicts = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        most = (largest(at(own, length), n) for n in ("cache_bytes", *RATIOS))
        made.append(Cost(label, length, *most, verdicts))
    return sorted(made, key=lambda one: (one.cache_bytes is None, one.cache_bytes or 0))


RATIOS = ("prefill_ratio", "decode_ratio")


def largest(rows: Iterable[Row], name: str) -> float | None:
    """The largest number of that name; None where no row has it."""
    return max((row[name] for row in rows if row.get(name) is not None), default=None)
