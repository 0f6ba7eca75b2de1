"""How all figures of the report look: narrow, on a transparent ground, in colours that the page defines.

The page's colours are CSS variables, so that figures suit both a light and a dark page. matplotlib needs real
colours, so each colour here is a stand-in that the written SVG replaces by its variable. Figures are narrow
to stay readable on a phone, and have a description for readers who can't see them.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 3.8  # inches; 10 pt letters are then 12 px high on a screen of 390 px
SERIES = 8  # number of series colours that the page defines, --series-0 to --series-7
INK, MUTED, GRID, PEER = (f"#0000f{index}" for index in range(4))
STAND_INS = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PEER: "--peer"}
STAND_INS |= {f"#0001f{index}": f"--series-{index}" for index in range(SERIES)}
LIMIT: dict[str, Any] = {"color": INK, "linewidth": 1.2, "linestyle": "--"}
"""The style of a line that bars and curves are compared with."""


@dataclass(frozen=True)
class Plot:
    """A figure, a description for readers who can't see it, and its caption."""

    drawn: Figure
    alt: str
    caption: str

    def svg(self, name: str) -> str:
        """Return the figure as an <svg> element in the page's style, without a fixed size.

        Its ids are unique on a page where `name` is.
        """
        import matplotlib as mpl

        text = io.StringIO()
        # Text stays text, so that it can be read aloud and searched, and uses the page's font.
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "minidist"}):
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            self.drawn.savefig(text, format="svg", metadata=nothing)
        svg = text.getvalue()
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
        svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
        for stand_in, variable in STAND_INS.items():
            svg = svg.replace(stand_in, f"var({variable})")
        # Several figures share one page, so drop the ids that nothing refers to and make the others unique.
        used = set(re.findall(r"#([\w.-]+)", svg))
        svg = re.sub(r' id="([^"]+)"', lambda it: f' id="{name}-{it[1]}"' if it[1] in used else "", svg)
        svg = re.sub(r"#(?=[\w.-]+[\")])", f"#{name}-", svg)
        return svg.replace("<svg", f'<svg role="img" aria-label="{escape(self.alt)}"', 1)


End = tuple[float, float, str, str]
"""The end of a line: x, y, its name and its colour."""


def color(index: int) -> str:
    """Return the colour of a series."""
    return f"#0001f{index % SERIES}"


def figure(height: float) -> tuple[Figure, Axes]:
    """Return an empty figure with one axes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 10, "axes.edgecolor": MUTED, "axes.labelcolor": MUTED}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots()
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=MUTED, labelsize=10, length=0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def powers_of_two(axes: Axes, ticks: Sequence[int], words: Callable[[int], str] = str) -> None:
    """Make the x axis logarithmic, with these ticks alone."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [words(tick) for tick in ticks])
    axes.minorticks_off()


def plain_number(value: float, _: object = None) -> str:
    """Write a tick without an exponent: `20,000`, `0.5`."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def round_ticks(low: float, high: float) -> list[float]:
    """Return ticks for a logarithmic axis: powers of ten, with numbers in between if these are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        found = [digit * 10.0**decade for decade in decades for digit in digits]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) > 1:
            break
    return found


def apart(heights: list[float], gap: float, ceiling: float) -> list[float]:
    """Move ascending heights so that they are at least `gap` apart and none is above the ceiling."""
    moved = list(heights)
    for below in range(len(moved) - 1):
        moved[below + 1] = max(moved[below + 1], moved[below] + gap)
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], ceiling)
        ceiling = moved[index] - gap
    return moved


def spread(
    ends: Iterable[End], gap: float, low: float, high: float, log: bool = True
) -> list[tuple[End, float]]:
    """Return the ends of lines from the lowest up, each with the height of its name, so that none overlap.

    gap: the least distance of two names, as a share of the axis from `low` to `high`.
    """
    to, back = (math.log, math.exp) if log else (float, float)
    ordered = sorted(ends, key=lambda end: end[1])
    heights = apart([to(end[1]) for end in ordered], gap * (to(high) - to(low)), to(high))
    return [(end, back(height)) for end, height in zip(ordered, heights, strict=True)]


def name_ends(
    axes: Axes, ends: Iterable[End], gap: float = 0.065, log: bool = True, fontsize: float = 10
) -> None:
    """Write each line's name at its end, and move overlapping names apart, within the axes."""
    offset: dict[str, Any] = {"xytext": (8, 0), "textcoords": "offset points"}
    for (x, _, name, shade), height in spread(ends, gap, *axes.get_ylim(), log=log):
        axes.annotate(name, (x, height), va="center", color=shade, fontsize=fontsize, **offset)
