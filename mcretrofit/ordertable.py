"""The rows of an order run as Markdown: means and spreads over seeds, expected beside measured; curves.

Differences are taken seed by seed: the two trainings of a seed saw the same data in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from mcretrofit.errors import RetrofitError

Row = Mapping[str, Any]
SMOOTH = 5  # steps that a point of a curve is the mean of
SIZE = (10, 6)  # inches


def markdown(rows: Iterable[Row], expected: Sequence[Sequence[str]]) -> str:
    """The table and, where pairs are expected, what came of each."""
    rows = list(rows)
    if not rows:
        raise RetrofitError("there are no rows yet: nothing to make a table of")
    parts = [_table(rows)]
    parts += [_checks(rows, expected)] if expected else []
    return "\n\n".join(parts) + "\n"


def _table(rows: list[Row]) -> str:
    probes = list(dict.fromkeys((row["task"], row["length"]) for row in rows))
    probes.sort(key=lambda probe: (probe[0] == "prose", probe[1]))
    head = [f"{'prose' if task == 'prose' else 'recall'} {length}" for task, length in probes]
    lines = [["model", "caching", "parameters", "seeds", *head]]
    lines.append(["---"] * 2 + ["---:"] * (2 + len(probes)))
    models = list(dict.fromkeys(row["model"] for row in rows))
    pairs = dict.fromkeys((row["model"], row["variant"]) for row in rows)
    for model, variant in sorted(pairs, key=lambda pair: models.index(pair[0])):
        own = [row for row in rows if (row["model"], row["variant"]) == (model, variant)]
        scores = [list(_scores(own, *probe).values()) for probe in probes]
        seeds = str(len({row["seed"] for row in own}))
        lines.append([model, variant, f"{own[0]['parameters']:,}", seeds, *map(_spread, scores)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _scores(rows: Iterable[Row], task: str, length: int) -> dict[int, float]:
    """By seed."""
    return {
        row["seed"]: row["score"] for row in rows if (row["task"], row["length"]) == (task, length)
    }


def _spread(scores: Sequence[float]) -> str:
    """Mean and standard deviation."""
    if not scores:
        return "-"
    return f"{mean(scores):.3f}" + (f" ± {stdev(scores):.3f}" if len(scores) > 1 else "")


def _checks(rows: list[Row], expected: Sequence[Sequence[str]]) -> str:
    """Each expected pair of variants, for every model that has both, at the longest length."""
    length = max(row["length"] for row in rows)
    lines = [
        "| expected | model | recall apart, seed by seed | agrees |",
        "| --- | --- | --- | --- |",
    ]
    for better, worse in expected:
        for model in dict.fromkeys(row["model"] for row in rows):
            own = [row for row in rows if row["model"] == model]
            found = [
                _scores([r for r in own if r["variant"] == variant], "symbols", length)
                for variant in (better, worse)
            ]
            apart = [found[0][seed] - found[1][seed] for seed in found[0].keys() & found[1].keys()]
            if apart:
                said = " ".join(f"{one:+.3f}" for one in apart)
                lines.append(f"| {better} > {worse} | {model} | {said} | {agreement(apart)} |")
    return f"Recall at {length} tokens:\n\n" + "\n".join(lines)


def agreement(apart: Sequence[float]) -> str:
    """`yes` or `no` where every one of several seeds says so, `same` where none differs."""
    if not any(apart):
        return "same"
    if len(apart) == 1:
        return "one seed"
    if all(one > 0 for one in apart):
        return "yes"
    return "no" if all(one < 0 for one in apart) else "unclear"


def draw(rows: Iterable[Row], cells: Path, target: Path) -> None:
    """Answers during training, a panel for each model and a line for each variant, as a picture."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RetrofitError(
            f"{target}: matplotlib is not installed (the extra `report` has it)"
        ) from error
    lines: dict[str, dict[str, list[list[float]]]] = {}
    for cell, row in {row["cell"]: row for row in rows}.items():
        curve = _curve(cells / cell / "log.jsonl")
        if curve:
            lines.setdefault(row["model"], {}).setdefault(row["variant"], []).append(curve)
    if not lines:
        raise RetrofitError(f"{cells} holds no losses to draw")
    across = min(3, len(lines))
    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(
        figure.subplots(-(-len(lines) // across), across, squeeze=False, sharey=True).flat
    )
    for axes, (model, variants) in zip(panels, lines.items(), strict=False):
        for variant, curves in variants.items():
            points = [mean(values) for values in zip(*curves, strict=False)]
            axes.plot([SMOOTH * (i + 1) for i in range(len(points))], points, label=variant)
        axes.set(title=model, xlabel="step", ylabel="answers right")
        axes.legend(fontsize=6)
    for axes in panels[len(lines) :]:
        axes.set_visible(False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=90, format=target.suffix.lstrip(".") or "png")


def _curve(path: Path) -> list[float]:
    """The share of right answers, a point for every `SMOOTH` steps; a step written twice counts once."""
    steps: dict[int, float] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        steps[row["step"]] = row["answers"]
    values = [steps[step] for step in sorted(steps) if steps[step] == steps[step]]
    return [mean(values[i : i + SMOOTH]) for i in range(0, len(values) - SMOOTH + 1, SMOOTH)]
