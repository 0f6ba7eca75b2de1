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

WIDTH = 4.6  # inches; 10 pt letters are then 11 px high on a screen of 390 px
SERIES = 8  # number of series colours that the page defines, --series-0 to --series-7
INK, MUTED, GRID, PEER, GOOD, BAD, CARD = (f"#0000f{index}" for index in range(7))
STAND_INS = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PEER: "--peer", GOOD: "--good", BAD: "--bad"}
STAND_INS |= {CARD: "--card"}
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
        """Return the figure as an <svg> element, with ids that are unique on a page where `name` is."""
        role = f'<svg role="img" aria-label="{escape(self.alt)}"'
        return svg(self.drawn, name).replace("<svg", role, 1)


End = tuple[float, float, str, str]
"""The end of a line: x, y, its name and its colour."""


def color(index: int) -> str:
    """Return the colour of a series."""
    return f"#0001f{index % SERIES}"


def figure(height: float) -> tuple[Figure, Axes]:
    """Return an empty figure with one axes."""
    drawn, (axes,) = stacked(height, 1)
    return drawn, axes


def stacked(height: float, rows: int) -> tuple[Figure, list[Axes]]:
    """Return an empty figure with several axes above each other that share the x axis."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 10, "axes.edgecolor": MUTED, "axes.labelcolor": MUTED}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        several = list(figure.subplots(rows, sharex=True, squeeze=False)[:, 0])
    figure.patch.set_alpha(0)
    for axes in several:
        axes.patch.set_alpha(0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(colors=MUTED, labelsize=9, length=0)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, several


def svg(figure: Figure, name: str) -> str:
    """Return the figure as an <svg> element in the page's style, with unique ids and no fixed size."""
    import matplotlib as mpl

    text = io.StringIO()
    # Text stays text, so that it can be read aloud and searched, and uses the page's font.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "minidist"}):
        figure.savefig(
            text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for stand_in, variable in STAND_INS.items():
        svg = svg.replace(stand_in, f"var({variable})")
    # Several figures share one page, so drop the ids that nothing refers to and make the others unique.
    used = set(re.findall(r"#([\w.-]+)", svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", svg)
    return re.sub(r"#(?=[\w.-]+[\")])", f"#{name}-", svg)


def after(axes: Axes, x: float, y: float, text: str) -> None:
    """Write a text after the end of a bar, on top of any line there."""
    ground = {"facecolor": CARD, "edgecolor": "none", "pad": 0.8}
    offset: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points"}
    axes.annotate(text, (x, y), **offset, va="center", fontsize=9, color=MUTED, bbox=ground, zorder=3)


def legend(figure: Figure, names: dict[str, str], columns: int = 3) -> None:
    """Draw a legend below the figure; `names` maps colours to names."""
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(color=shade, label=name) for shade, name in names.items()],
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=MUTED,
        handlelength=1.0,
        columnspacing=1.2,
    )


def rows_down(axes: Axes, count: int, axis: str, top: float = -0.6, bottom: float = -0.4) -> None:
    """Number rows of bars from the top; each row has its name written above it, so the y axis has none."""
    axes.set_ylim(count + bottom, top)
    axes.set_yticks([])
    axes.set_xlabel(axis)


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


def shares(
    rows: list[tuple[str, float | None, str, str]], of: str, caption: str, what: str = "share of"
) -> Plot:
    """Draw percentages as bars with a line at 100.

    A row has a name, a percentage or None, a text and a colour.
    """
    drawn, axes = figure(0.6 + 0.27 * len(rows))
    for row, (_, percent, text, shade) in enumerate(rows):
        reach = percent or 0.0
        axes.barh(row, reach, height=0.62, color=shade)
        after(axes, 100.0 if 70 < reach < 100 else reach, row, text)  # not on the line
    axes.axvline(100.0, **LIMIT)
    axes.set_xlim(0, max(110.0, *(percent or 0.0 for _, percent, _, _ in rows)) * 1.3)
    rows_down(axes, len(rows), f"{what} {of}, percent")
    axes.set_yticks(range(len(rows)), [name for name, _, _, _ in rows])
    for label, (_, _, _, shade) in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(shade)
    axes.grid(visible=False, axis="y")
    told = "; ".join(f"{name} {text}" for name, _, text, _ in rows)
    return Plot(drawn, f"Bars with a line at 100 percent of {of}: {told}.", caption)
