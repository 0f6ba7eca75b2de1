"""Figures that are readable on light and on dark, with a caption, and words for those who do not see them.

    figure, axes = draw(height=3.2)
    axes.plot(sizes, seconds, color=BLUE)
    name(axes, sizes[-1], seconds[-1], "ring", BLUE)    # a label at the line, in place of a legend
    show(figure, "What the picture says, in a sentence.", alt="What is seen, for those who do not see it.")

Colours are Okabe and Ito's, which people with any colour vision tell apart ("Color Universal Design", 2008).
Ink stands for the colour of the page's letters, until the SVG is written.
"""

from __future__ import annotations

import html
import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from checks.support.catalogue import TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PINK, RED, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"
COLORS = (BLUE, ORANGE, GREEN, PINK, RED, SKY)
INK, MUTED, GRID = "#0000f0", "#0000f1", "#0000f2"
WORDS = {
    INK: "currentColor",
    MUTED: "color-mix(in srgb, currentColor 68%, transparent)",
    GRID: "color-mix(in srgb, currentColor 14%, transparent)",
}
# A little of the letters' colour: darker on light, lighter on dark, and so readable on both.
WORDS |= {color: f"color-mix(in srgb, {color} 82%, currentColor)" for color in COLORS}
WIDTH = 7.2  # inches

_numbers = itertools.count(1)


def draw(height: float = 3.2, columns: int = 1, width: float = WIDTH, **options: Any) -> tuple[Figure, Any]:
    """An empty figure without a ground, and its axes: one, or an array of several columns."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(
        {"font.size": 10, "axes.edgecolor": MUTED, "axes.labelcolor": INK, "text.color": INK}
    ):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(1, columns, **options)
    figure.patch.set_alpha(0)
    for each in [axes] if columns == 1 else axes.flat:
        each.patch.set_alpha(0)
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(colors=MUTED, labelcolor=INK, labelsize=9, length=3, which="both")
        each.grid(color=GRID, linewidth=0.8)
        each.set_axisbelow(True)
    return figure, axes


def name(axes: Axes, x: float, y: float, text: str, color: str = INK, dx: float = 6, dy: float = 0) -> None:
    """Write what a line is beside its end, dx and dy points away."""
    axes.annotate(
        text,
        (x, y),
        xytext=(dx, dy),
        textcoords="offset points",
        va="center",
        fontsize=9.5,
        color=color,
        annotation_clip=False,
    )


def show(figure: Figure | str, caption: str, alt: str) -> None:
    """Show a figure (or an <svg>) below the cell."""
    from IPython.display import HTML, display

    display(HTML(framed(figure if isinstance(figure, str) else svg(figure), caption, alt)))


def framed(svg: str, caption: str, alt: str, below: str = "") -> str:
    """The <figure> with its caption; `below` is put between the two."""
    svg = re.sub(r"<svg ", f'<svg role="img" aria-label="{html.escape(alt)}" ', svg, count=1)
    return (
        '<figure style="margin: 0.6em 0; max-width: 760px">'
        f'{svg}{below}<figcaption style="font-size: 90%; opacity: 0.85; margin-top: 0.3em">'
        f"{html.escape(caption)}</figcaption></figure>"
    )


def curves(
    x: Sequence[float],
    measured: Mapping[str, Sequence[float]],
    model: Mapping[str, Sequence[float]],
    labels: tuple[str, str],
    caption: str,
    alt: str,
    guess: tuple[float, float] | None = None,
) -> None:
    """Show measurements as dots, their model as dashed lines, and the reader's guess; both axes logarithmic.

    Args:
        x: what both depend on: the sizes.
        measured: by name, a value for each x; names are written at the lines' ends.
        model: the same, predicted; a name may be missing.
        labels: of the two axes, with units.
        caption, alt: as for `show`.
        guess: where the reader's guess lies, (x, y); None for no guess.
    """
    figure, axes = draw(height=3.6)
    for (key, values), color in zip(measured.items(), COLORS, strict=False):
        axes.plot(x, values, "o", color=color)
        if key in model:
            axes.plot(x, model[key], color=color, linestyle="--", linewidth=1.2)
    if guess is not None:
        axes.plot(*guess, "D", color=INK, fillstyle="none", markersize=9)
        # Left of it at the right edge, where the lines have their names.
        name(axes, *guess, "your guess", INK, dx=9 if guess[0] < x[-1] else -70)
    axes.set(xscale="log", yscale="log", xlabel=labels[0], ylabel=labels[1])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
        axis.set_minor_formatter("")
    # Names stand at the ends of their lines, moved apart where those are close.
    ends = sorted(
        (values[-1], key, color) for (key, values), color in zip(measured.items(), COLORS, strict=False)
    )
    bottom, top = axes.get_ylim()
    low = -math.inf
    for value, key, color in ends:
        points = (
            200 * math.log(value / bottom) / math.log(top / bottom)
        )  # of about 200 that the axes are high
        low = max(points, low + 13)
        name(axes, x[-1], value, key, color, dx=9, dy=low - points)
    show(figure, caption, alt)


def bars(
    values: Mapping[str, float],
    label: str,
    caption: str,
    alt: str,
    guess: tuple[str, float] | None = None,
    logarithmic: bool = True,
) -> None:
    """Show a bar for each value, from top to bottom, with its number at its end.

    Args:
        values: by name.
        label: of the axis, with its unit.
        caption, alt: as for `show`.
        guess: the name that the reader's guess is about, and the guess; None for no guess.
        logarithmic: whether each line is ten times the one before.
    """
    rows = [(key, value, BLUE) for key, value in values.items()]
    if guess is not None:  # in a row of its own, below what it is about
        place = 1 + [key for key, _, _ in rows].index(guess[0])
        rows.insert(place, ("your guess", guess[1], ORANGE))
    figure, axes = draw(height=0.9 + 0.34 * len(rows))
    for row, (_, value, color) in enumerate(rows):
        axes.barh(row, value, height=0.62, color=color)
        name(axes, value, row, f"{value:,.3g}")
    shown = [value for _, value, _ in rows]
    if logarithmic:
        axes.set_xscale("log")
        axes.set_xlim(min(shown) / 3, max(shown) * 4)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    else:
        axes.set_xlim(0, max(shown) * 1.15)
    axes.set_yticks(range(len(rows)), [key for key, _, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label)
    show(figure, caption, alt)


def svg(figure: Figure) -> str:
    """The figure as an <svg> that fits the page: its letters are text, its ids its own."""
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "minidist"}):
        figure.savefig(
            text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    found = text.getvalue()
    found = re.sub(r"<metadata>.*?</metadata>", "", found[found.index("<svg") :], flags=re.DOTALL)
    width = re.search(r'width="([\d.]+)pt"', found)
    found = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", found, count=1)
    found = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", found, count=1)
    points = float(width[1]) if width else 500
    found = found.replace("<svg ", f'<svg style="width: 100%; max-width: {points * 4 / 3:.0f}px" ', 1)
    found = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", found)
    for color, words in WORDS.items():
        found = re.sub(re.escape(color), words, found, flags=re.IGNORECASE)
    own = f"f{next(_numbers)}"
    used = set(re.findall(r'(?:url\(#|href="#)([\w.-]+)', found))
    found = re.sub(r' id="([^"]+)"', lambda m: f' id="{own}-{m[1]}"' if m[1] in used else "", found)
    return re.sub(r'(url\(#|href="#)', rf"\1{own}-", found)


def said(prediction: float | None) -> str:
    """The reader's guess, for a caption."""
    return "you made no guess" if prediction is None else f"your guess was {prediction:g}"


def ladder(here: int) -> None:
    """The picture of all lessons, as a staircase, with the one that this is."""
    step_x, step_y, left, top = 46, 15, 6, 22
    last = len(TITLES) - 1
    parts = []
    for number, title in enumerate(TITLES):
        x, y = left + step_x * number, top + step_y * (last - number)
        mine = number == here
        fill, strength = (BLUE, 1) if mine else ("currentColor", 0.22 if number < here else 0.08)
        parts.append(
            f'<rect x="{x}" y="{y}" width="{step_x - 3}" height="{step_y * (number + 1) + 8}" rx="2" '
            f'fill="{fill}" opacity="{strength}"><title>{html.escape(title)}</title></rect>'
            f'<text x="{x + (step_x - 3) / 2}" y="{top + step_y * (last + 1) + 3}" text-anchor="middle" '
            f'font-size="11" fill="{"white" if mine else "currentColor"}">{number:02d}</text>'
        )
        if mine:
            end = number > last / 2
            parts.append(
                f'<text x="{x + (step_x - 3 if end else 0)}" y="{y - 8}" font-size="14" font-weight="600" '
                f'fill="currentColor" text-anchor="{"end" if end else "start"}">'
                f"You are here: {number:02d} {html.escape(title)}</text>"
            )
    width, height = left * 2 + step_x * (last + 1), top + step_y * (last + 1) + 12
    picture = (
        f'<svg viewBox="0 0 {width} {height}" style="width: 100%; max-width: {width}px" '
        f'font-family="system-ui, sans-serif">{"".join(parts)}</svg>'
    )
    before = f"after {TITLES[here - 1]}" if here else "the first"
    after = f", before {TITLES[here + 1]}" if here < last else ", the last"
    show(
        picture,
        f"Lesson {here:02d} of {last:02d}, {before}{after}.",
        alt=f"A staircase of {last + 1} steps, one a lesson; this is step {here}, {TITLES[here]}.",
    )
