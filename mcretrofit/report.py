"""A report of a run: tables, charts and what it takes to repeat it, as one page, Markdown or CSV.

The page needs nothing but itself: no script, no font, no network.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mcretrofit import __version__
from mcretrofit._tables import Cost, Entry, Table, costs, models, tables
from mcretrofit.cards import markdown as pipes
from mcretrofit.errors import RetrofitError
from mcretrofit.pooling import size
from mcretrofit.recommend import Recommendation, recommend
from mcretrofit.results import CELL, SETTING, Found, Row, caching, labels

MANY = 3  # facts of a kind that stand in one line
COST_COLUMNS = ("setting", "length", "cache", "prefill", "decode", "verdicts")
_SAID = {
    "command": "commands",
    "version": "versions",
    "seed": "seeds",
    "threads": "threads",
    "model_hash": "model hashes",
    "started": "started",
}
_PLAIN = ("model", "model_hash", *SETTING, *CELL, "n", "score", "base_score", "low", "high")
_PLAIN += ("verdict", "cache_bytes", "prefill_ratio", "decode_ratio", "seconds", "base_seconds")
_PLAIN += ("version", "threads", "id", "started", "command")


class Part(NamedTuple):
    """One model of a run."""

    model: str
    rows: list[Row]
    advice: Recommendation
    tables: list[Table]
    costs: list[Cost]


class Report(NamedTuple):
    """A run, part by part, with what its rows tell of how it was made."""

    title: str
    parts: list[Part]
    facts: list[tuple[str, list[str]]]
    warnings: list[str]


def build(found: Found) -> Report:
    """The report of the rows that `results.read` found."""
    parts = [
        Part(name, rows, recommend(rows), tables(name, rows), costs(rows))
        for name, rows in models(found.rows).items()
    ]
    title = ", ".join(part.model for part in parts) or "unnamed model"
    return Report(title, parts, _facts(found.rows), found.warnings)


def _facts(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """What the rows say of their making, each thing once; what they don't say is said too."""
    made, silent = [], []
    for name, words in _SAID.items():
        said = list(dict.fromkeys(str(row[name]) for row in rows if row.get(name) is not None))
        if name == "started" and len(said) > 1:
            said = [f"{min(said)} to {max(said)}"]
        silent += [] if said else [words]
        made += [(words, said)] if said else []
    made += [("not recorded", [", ".join(silent)])] if silent else []
    return [*made, ("rows", [str(len(rows))])]


def cost_cells(one: Cost) -> tuple[str, ...]:
    """A line of the table of costs, for people."""
    ratios = ("-" if r is None else f"{r:.2f}x" for r in (one.prefill_ratio, one.decode_ratio))
    held = "-" if one.cache_bytes is None else size(one.cache_bytes)
    return (one.label, str(one.length), held, *ratios, one.verdicts)


def words(entry: Entry | None, apart: str = " ") -> str:
    """A score with its interval and verdict; `apart` stands between the two."""
    if entry is None:
        return "-"
    first = " ".join(word for word in (f"{entry.score:.3f}", entry.verdict) if word)
    second = ", ".join(word for word in (entry.spread, entry.share) if word)
    return f"{first}{apart}{second}" if second else first


def _flat(entry: Entry | None) -> str:
    """The same on one line."""
    return words(entry, " (") + ")" if entry and (entry.spread or entry.share) else words(entry)


def objects(report: Report) -> Iterator[dict[str, Any]]:
    """Every entry of every table, then the advice, model by model."""
    for part in report.parts:
        for table in part.tables:
            probe = {"model": part.model, "task": table.task, "dialect": table.dialect}
            probe["metric"] = table.metric
            for line in table.lines:
                named = {**probe, "setting": line.label, "kind": line.kind}
                pairs = zip(table.lengths, line.entries, strict=True)
                yield from ({**named, "length": n, **e._asdict()} for n, e in pairs if e)
        advice = part.advice
        yield {"model": part.model, "recommendation": advice.line, "setting": advice.setting}


def markdown(report: Report) -> str:
    """The tables as Markdown."""
    out = [f"# {_safe(report.title)}", ""]
    for part in report.parts:
        name = f"{_safe(part.model)}: " if len(report.parts) > 1 else ""
        out += [f"**{name}{_safe(part.advice.line)}**", ""]
        for table in part.tables:
            out += [f"## {_safe(f'{table.title}: {table.measure}')}", ""]
            lines = [
                [_safe(f"- {x.label}" if x.kind == "control" else x.label), *map(_flat, x.entries)]
                for x in table.lines
            ]
            out += [pipes(("setting", *map(str, table.lengths)), lines), ""]
        if part.costs:
            lines = [map(_safe, cost_cells(one)) for one in part.costs]
            out += ["## Cost", "", pipes(COST_COLUMNS, lines), ""]
    out += ["## How it was made", ""]
    for name, said in report.facts:
        # many commands read better one below the other
        between = "\n  - " if len(said) > MANY else "; "
        out.append(
            f"- {name}:{between if len(said) > MANY else ' '}{between.join(map(_safe, said))}"
        )
    out += [f"- note: {_safe(warning)}" for warning in report.warnings]
    return "\n".join(out) + "\n"


def _safe(text: str) -> str:
    """Text that neither ends a cell nor becomes a tag."""
    text = " ".join(text.split())
    for sign, name in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|")):
        text = text.replace(sign, name)
    return text


def table_of_rows(report: Report) -> str:
    """Every row as CSV, controls in columns of their own."""
    names = sorted({n for part in report.parts for row in part.rows for n in _controls(row)})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_PLAIN, *(f"control_{name}" for name in names)])
    for part in report.parts:
        for row in part.rows:
            row = {**(caching(row) or {}), **row}
            writer.writerow([row.get(n) for n in _PLAIN] + [_controls(row).get(n) for n in names])
    return text.getvalue()


def _controls(row: Row) -> dict[str, Any]:
    return row.get("controls") or {}


def html(report: Report) -> str:
    """One page that needs no network; raises RetrofitError where matplotlib is missing."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    from mcretrofit._canvas import check
    from mcretrofit._figures import figures

    check()
    place = PackageLoader("mcretrofit", "pages")
    pages = Environment(
        loader=place,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = []
    for part in report.parts:
        known = labels(part.rows)
        chosen = next((key for key in known if known[key] == part.advice.label), None)
        made = [one for table in part.tables for one in figures(table, known, chosen)]
        # our own charts: their texts were escaped when they were drawn
        shown.append([(f.title, list(map(Markup, f.charts)), f.note) for f in made])
    return pages.get_template("report.html").render(
        report=report,
        figures=shown,
        cost_cells=cost_cells,
        cost_columns=COST_COLUMNS,
        version=__version__,
    )


def write(path: Path, text: str, source: Path) -> None:
    """Write a file wholly or not at all; `source` is never written over."""
    if path.resolve() == source.resolve():
        raise RetrofitError(f"{path} holds the results themselves; name another file")
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        work.write_text(text, encoding="utf-8", errors="replace")
        os.replace(work, path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RetrofitError(f"{path} cannot be written: {reason}") from error
    finally:
        work.unlink(missing_ok=True)
