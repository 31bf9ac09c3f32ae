"""The report's charts: heat maps of length and depth, recall against cost, text by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mcretrofit._canvas import (
    FAINT,
    INK,
    MUTED,
    PICK,
    SERIES,
    beside,
    canvas,
    plain,
    room,
    short,
    spread,
)
from mcretrofit.pooling import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 3.7, 2.8  # inches: one chart fits a narrow window, more stand side by side
ANNOTATED = 80  # cells of a heat map that still carry their number

NAMED = 6  # points up to which dominated ones are named too


class Point(NamedTuple):
    """A setting in the plot of recall against cost; `x` None is the base where it costs nothing."""

    label: str
    x: float | None
    y: float
    chosen: bool = False


class Curve(NamedTuple):
    """Windows `(start, end, value)` of one setting; `rank` 0 is the base, None is kept grey."""

    label: str
    windows: list[tuple[float, float, float]]
    rank: int | None


def heat(
    title: str,
    lengths: Sequence[int],
    depths: Sequence[float],
    grid: Sequence[Sequence[float | None]],
    span: tuple[float, float],
) -> str:
    """`grid[depth][length]` in colours from `span`; a cell that was not measured stays empty."""
    tall = min(0.3, 4.2 / len(depths))
    wide = 0.52 * len(lengths)
    width, height = max(0.65 + wide, 1.55), 0.85 + tall * len(depths)
    with canvas(width, height, f"heat map of {title}") as (axes, made):
        axes.figure.subplots_adjust(
            left=0.55 / width,
            right=(0.55 + wide) / width,
            bottom=0.5 / height,
            top=1 - 0.3 / height,
        )
        numbers = [[math.nan if v is None else v for v in line] for line in grid]
        axes.pcolormesh(numbers, cmap="cividis", vmin=span[0], vmax=span[1], edgecolors="face")
        axes.invert_yaxis()
        axes.set_xticks([i + 0.5 for i in range(len(lengths))], [plain(n) for n in lengths])
        step = max(1, math.ceil(len(depths) / 10))
        axes.set_yticks(
            [i + 0.5 for i in range(0, len(depths), step)], [f"{d:.0f}" for d in depths[::step]]
        )
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("length (tokens)")
        axes.set_ylabel("depth (%)")
        axes.set_title(short(title, 11 + 8 * len(lengths)))
        if len(lengths) * len(depths) <= ANNOTATED:
            _annotate(axes, grid, span)
    return made[0]


def _annotate(axes: Axes, grid: Sequence[Sequence[float | None]], span: tuple) -> None:
    middle = (span[0] + span[1]) / 2
    for i, line in enumerate(grid):
        for j, value in enumerate(line):
            if value is None:
                axes.text(j + 0.5, i + 0.5, "–", ha="center", va="center", color=MUTED)
                continue
            ink = "#ffffff" if value < middle else "#000000"
            axes.text(j + 0.5, i + 0.5, f"{value:.2f}", ha="center", va="center", color=ink, size=8)


def scale(span: tuple[float, float], label: str) -> str:
    """The colours of a row of heat maps and what they mean."""
    with canvas(2.4, 0.55, f"colour scale of {label}") as (axes, made):
        axes.figure.subplots_adjust(left=0.05, right=0.95, bottom=0.72, top=0.98)
        axes.pcolormesh([[i / 31 for i in range(32)]], cmap="cividis", edgecolors="face")
        middle = (span[0] + span[1]) / 2
        axes.set_xticks([0, 16, 32], [f"{v:.3g}" for v in (span[0], middle, span[1])])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        axes.set_xlabel(label, labelpad=1)
    return made[0]


def pareto(points: Sequence[Point], across: str, up: str, in_bytes: bool) -> str:
    """Scores against a cost: the frontier drawn and named, dominated settings as open dots."""
    known = [point.x for point in points if point.x is not None]
    least, most = min(known), max(known)
    # a cost of nothing has no place on a logarithmic axis: it stands left of the others
    nothing = least / 2.5 if in_bytes else 1.0
    placed = [point._replace(x=nothing if point.x is None else point.x) for point in points]
    front = frontier(placed)
    with canvas(WIDTH, HEIGHT, f"{up} against {across}") as (axes, made):
        axes.figure.subplots_adjust(left=0.14, right=0.96, bottom=0.17, top=0.96)
        axes.step(
            [p.x for p in front] + [most], [p.y for p in front] + [front[-1].y], where="post",
            color=MUTED, lw=1.2, zorder=1,
        )  # fmt: skip
        _across(axes, (nothing, least, most), in_bytes)
        if all(0 <= point.y <= 1 for point in points):
            axes.set_ylim(-0.04, 1.04)
        axes.set(xlabel=across, ylabel=up, axisbelow=True)
        axes.grid(True)
        for point in placed:
            colour = PICK if point.chosen else INK if point.label == "base" else SERIES[0]
            full = colour if point in front or point.chosen else "none"
            axes.plot(point.x, point.y, "o", ms=5.5, mfc=full, mec=colour, zorder=2)
        named = [p for p in placed if p in front or p.chosen or len(placed) <= NAMED]
        named.sort(key=lambda p: (not p.chosen, p not in front, -p.y))
        names = [(p.x, p.y, short(p.label), PICK if p.chosen else INK) for p in named]
        beside(axes, names, [(p.x, p.y) for p in placed])
    return made[0]


def _across(axes: Axes, ends: tuple[float, float, float], in_bytes: bool) -> None:
    nothing, least, most = ends
    if not in_bytes:
        wide = most - min(1, least) or 1
        axes.set_xlim(min(1, least) - 0.05 * wide, most + 0.08 * wide)
        return
    ticks = _ticks(least, most)
    axes.set_xscale("log")
    axes.set_xticks([nothing, *ticks], ["none", *map(size, ticks)])
    axes.minorticks_off()
    axes.set_xlim(nothing / 1.3, most * 1.15)


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats at the same or a lower cost, cheapest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x or 0.0, -p.y)):
        if not front or point.y > front[-1].y:
            front.append(point)
    return front


def _ticks(least: float, most: float) -> list[float]:
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [s * 10.0**p for p in powers for s in steps if least * 0.9 <= s * 10.0**p <= most]
        if len(ticks) <= 4:
            return ticks or [least]
    return ticks[:: math.ceil(len(ticks) / 4)]


def _beside(axes: Axes, places: Sequence[tuple[float, float, bool]], labels: list[str]) -> None:
    """Names at the right edge, each with a thin line to its point, none over another."""
    low, high = axes.get_ylim()
    gap = (high - low) * 0.065
    edge = axes.get_xlim()[1]
    heights = spread([y for _, y, _ in places], gap, low + gap / 2, high - gap / 2)
    for (x, y, chosen), height, label in zip(places, heights, labels, strict=True):
        colour = PICK if chosen else INK
        axes.annotate(
            label, (x, y), (edge, height), va="center", color=colour, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": FAINT, "lw": 0.8, "shrinkA": 0, "shrinkB": 3},
            weight="bold" if chosen else "normal",
        )  # fmt: skip


def curves(lines: Sequence[Curve], up: str, zero: str = "") -> str:
    """Values by position; `zero` names a line at nought, from which the others differ."""
    named = [line for line in lines if line.rank is not None]
    labels = [short(line.label) for line in named] + ([zero] if zero else [])
    with canvas(WIDTH, HEIGHT, f"{up} by position") as (axes, made):
        axes.figure.subplots_adjust(left=0.2, right=room(labels, WIDTH), bottom=0.17, top=0.96)
        axes.set_xscale("log", base=2)
        ends: list[tuple[float, float, bool]] = []
        for line in sorted(lines, key=lambda one: one.rank is not None):
            xs = [math.sqrt(max(start, end / 2) * end) for start, end, _ in line.windows]
            ys = [value for *_, value in line.windows]
            colour = FAINT if line.rank is None else (INK, PICK, *SERIES)[line.rank]
            axes.plot(xs, ys, "-o", ms=3, color=colour, lw=2 if line.rank == 0 else 1.5)
        ends = [(_last(line), line.windows[-1][2], line.rank == 1) for line in named]
        edges = sorted({end for line in lines for _, end, _ in line.windows})
        axes.set_xticks(edges[-6:], [plain(edge) for edge in edges[-6:]])
        axes.minorticks_off()
        axes.set_xlim(edges[0] / 2, edges[-1])
        if zero:
            axes.axhline(0, color=INK, lw=1.2, zorder=1)
            ends.append((edges[-1], 0.0, False))
        axes.set_xlabel("position in the document (tokens)")
        axes.set_ylabel(up)
        axes.grid(True)
        axes.set_axisbelow(True)
        _beside(axes, ends, labels)
    return made[0]


def _last(line: Curve) -> float:
    start, end, _ = line.windows[-1]
    return math.sqrt(max(start, end / 2) * end)
