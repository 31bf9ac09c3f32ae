"""A small matplotlib figure as SVG that sits in a page: its colours are the page's own variables."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from math import dist
from typing import TYPE_CHECKING, Any

from mcretrofit.errors import RetrofitError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# stand-ins that no palette holds, each replaced by a variable of the page's style sheet
INK, MUTED, FAINT, PICK = "#010203", "#010204", "#010205", "#010206"
SERIES = ("#010207", "#010208", "#010209", "#01020a")
_NAMES = ("ink", "muted", "faint", "pick", "one", "two", "three", "four")
_VARIABLES = dict(zip((INK, MUTED, FAINT, PICK, *SERIES), _NAMES, strict=True))
_LOOK = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.grid.axis": "y",
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.6,
    **{f"{name}.color": INK for name in ("text", "xtick", "ytick")},
    **{f"axes.{name}color": INK for name in ("label", "title")},
    **{"axes.edgecolor": MUTED, "grid.color": FAINT, "grid.linewidth": 0.7},
}
_CHART = count(1)


def check() -> None:
    """Raises RetrofitError where the plotting library is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RetrofitError(
            "the HTML page needs matplotlib for its charts: pip install 'mcretrofit[report]' "
            "(tables, --markdown, --csv and --json work without it)"
        ) from error


@contextmanager
def canvas(width: float, height: float, said: str) -> Iterator[tuple[Axes, list[str]]]:
    """Axes of a figure in inches and a list that the SVG is appended to; `said` is read aloud."""
    check()
    import matplotlib
    from matplotlib.figure import Figure

    made: list[str] = []
    with matplotlib.rc_context(_LOOK), warnings.catch_warnings():
        # a font without the letters of a model's name: the browser has others
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure = Figure(figsize=(width, height))
        yield figure.add_subplot(), made
        text = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    made.append(_inline(text.getvalue(), said))


def _inline(svg: str, said: str) -> str:
    """Without prolog, name spaces and styles of its own, its ids apart from those of other charts."""
    from html import escape

    number = next(_CHART)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.S)
    head, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    wide = re.search(r'width="([\d.]+)pt"', head)
    assert box and wide
    size = f'style="width: {float(wide[1]):.0f}pt"'
    head = f'<svg class="chart" role="img" aria-label="{escape(said)}" {box[0]} {size}'
    rest = re.sub(r"<g id=\"(?:figure|axes|text|patch|line2d|matplotlib)[^\"]*\"", "<g", rest)
    for name in re.findall(r' id="([^"]+)"', rest):
        rest = re.sub(rf'(["#]){re.escape(name)}(?=[")])', rf"\g<1>c{number}-{name}", rest)
    rest = re.sub(r"font-family: [^;\"]*", "font-family: inherit", rest)
    return _coloured(f"{head}>{rest}".rstrip())


def _coloured(svg: str) -> str:
    for stand_in, name in _VARIABLES.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return svg


def spread(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Heights for labels, at least `gap` apart and in order, as near to their own as may be."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed: list[float] = []
    for i in order:
        placed.append(max(heights[i], low, placed[-1] + gap if placed else low))
    over = high
    for at in reversed(range(len(placed))):
        placed[at] = min(placed[at], over)
        over = placed[at] - gap
    found = [0.0] * len(heights)
    for i, height in zip(order, placed, strict=True):
        found[i] = height
    return found


# where a name may stand beside its point, in points of type: across, up, which end is there
_PLACES = (
    *((-5, 7, "right"), (6, -8, "left"), (7, 0, "left"), (6, 8, "left"), (-5, -9, "right")),
    *((-6, 18, "right"), (8, -18, "left"), (8, 18, "left"), (-6, -19, "right")),
)


def beside(axes: Axes, named: Sequence[tuple], others: Sequence[tuple[float, float]]) -> None:
    """Names `(x, y, label, colour)` beside their points where they cover neither name nor point."""
    figure = axes.figure
    figure.set_dpi(72)
    dots = [axes.transData.transform(at) for at in others]
    taken: list[tuple] = []
    left, bottom, _, top = axes.get_window_extent().extents
    for x, y, label, colour in named:
        at_x, at_y = axes.transData.transform((x, y))
        wide = 5.4 * len(label)
        # a name stays off its own point, and farther off others, whose it would seem to be
        tall = [4 if dist(dot, (at_x, at_y)) < 1 else 8 for dot in dots]
        around = [(x - 4, y - h, x + 4, y + h) for (x, y), h in zip(dots, tall, strict=True)]
        for across, up, end in _PLACES:
            start = at_x + across - (wide if end == "right" else 0)
            box = (start, at_y + up - 5, start + wide, at_y + up + 5)
            inside = (
                left < box[0] and box[2] < figure.bbox.width and bottom < box[1] and box[3] < top
            )
            if inside and not any(_touch(box, one) for one in taken + around):
                taken.append(box)
                axes.annotate(
                    label, (x, y), (across, up), textcoords="offset points", ha=end, va="center",
                    color=colour, annotation_clip=False,
                )  # fmt: skip
                break


def _touch(one: tuple, other: tuple) -> bool:
    apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    return not apart


def short(label: str, most: int = 26) -> str:
    """A label that leaves room for the chart."""
    return label if len(label) <= most else f"{label[: most - 1]}…"


def room(labels: Sequence[str], width: float) -> float:
    """Where axes that leave room for labels at their right end, as a share of the figure."""
    return 1 - min(0.5, (0.075 * max(map(len, labels), default=0) + 0.2) / width)


def plain(value: float, _: Any = None) -> str:
    """A count of tokens on an axis."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:,.0f}"
