"""The style of the report's figures: narrow, with a transparent background, in colours that the page defines.

The page's colours are CSS variables, so that figures suit both a light and a dark page. matplotlib needs real
colours, so each colour here is a stand-in that the written SVG replaces by its variable. Figures are narrow
to stay readable on a phone.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.6  # inches; 10 pt letters are then 11 px high on a screen of 390 px
SERIES = 8  # number of series colours that the page defines, --series-0 to --series-7
INK, MUTED, GRID, PEER, GOOD, BAD, CARD = (f"#0000f{index}" for index in range(7))
STAND_INS = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PEER: "--peer", GOOD: "--good", BAD: "--bad"}
STAND_INS |= {CARD: "--card"}
STAND_INS |= {f"#0001f{index}": f"--series-{index}" for index in range(SERIES)}


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
    axes.annotate(
        text,
        (x, y),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=MUTED,
        bbox=ground,
        zorder=3,
    )


def legend(figure: Figure, names: dict[str, str], columns: int = 3) -> None:
    """Draw a legend below the figure; `names` maps colours to names."""
    from matplotlib.patches import Patch

    keys = [Patch(color=shade, label=name) for shade, name in names.items()]
    figure.legend(
        handles=keys,
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=MUTED,
        handlelength=1.0,
        columnspacing=1.2,
    )


def apart(heights: list[float], gap: float, ceiling: float) -> list[float]:
    """Move ascending heights so that they are at least `gap` apart and none is above the ceiling."""
    moved = list(heights)
    for below in range(len(moved) - 1):
        moved[below + 1] = max(moved[below + 1], moved[below] + gap)
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], ceiling)
        ceiling = moved[index] - gap
    return moved


def shares(rows: list[tuple[str, float | None, str, str]], axis: str) -> tuple[Figure, str]:
    """Draw percentages as bars with a line at 100; return the figure and its description.

    A row has a name, a percentage or None, a text and a colour.
    """
    drawn, axes = figure(0.6 + 0.27 * len(rows))
    for row, (_, percent, text, shade) in enumerate(rows):
        reach = percent or 0.0
        axes.barh(row, reach, height=0.62, color=shade)
        after(axes, 100.0 if 70 < reach < 100 else reach, row, text)  # not on the line
    axes.axvline(100.0, color=INK, linewidth=1.2, linestyle="--")
    axes.set_xlim(0, max(110.0, *(percent or 0.0 for _, percent, _, _ in rows)) * 1.3)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [name for name, _, _, _ in rows])
    for label, (_, _, _, shade) in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(shade)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(axis)
    return drawn, "; ".join(f"{name} {text}" for name, _, text, _ in rows)
