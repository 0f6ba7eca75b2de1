"""Rooflines, with what was measured on them (lessons 0 and 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from checks.figures import COLORS, INK, MUTED, draw, name, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Place = tuple[float, float]
"""An intensity in operations per byte, and operations in a second."""
HEIGHT = 215  # points that the axes are high, about: for the distance of names


def roofline_figure(
    roofs: Mapping[str, Place],
    points: Mapping[str, Place] | None = None,
    marks: Mapping[str, float] | None = None,
    guess: Place | None = None,
    words: tuple[str, str] = ("FLOP/byte", "GFLOP/s"),
    caption: str = "",
    alt: str = "",
) -> None:
    """Show rooflines; a point gets a ring on the first of them, where it is predicted, above or below.

    Args:
        roofs: peak and bandwidth, by name.
        points: what was measured, by name.
        marks: intensities that get a dotted line with a name.
        guess: where the reader's guess lies, or None.
        words: of the axes: operations per byte, and billions of operations in a second.
        caption, alt: as for `show`.
    """
    points, marks = points or {}, marks or {}
    figure, axes = draw(height=4.0)
    ridges = [peak / bandwidth for peak, bandwidth in roofs.values()]
    intensities = [*(x for x, _ in points.values()), *marks.values(), *ridges]
    left, right = min([1 / 24, *intensities]) / 1.5, 4 * max(intensities)
    rates = [*(rate for _, rate in points.values()), *([guess[1]] if guess else [])]
    lowest = [min(peak, bandwidth * left) for peak, bandwidth in roofs.values()]
    highest = max([*(peak for peak, _ in roofs.values()), *rates])
    bottom, top = min([*lowest, *rates]) / 2e9, 3 * highest / 1e9
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top))
    names = []
    for (label, (peak, bandwidth)), color in zip(roofs.items(), COLORS, strict=False):
        xs = [left, peak / bandwidth, right]
        axes.plot(xs, [min(peak, bandwidth * x) / 1e9 for x in xs], color=color, linewidth=1.8)
        ridge = peak / bandwidth
        shown = f"{ridge:,.0f}" if ridge >= 100 else f"{ridge:.3g}"
        names.append((peak / 1e9, f"{label}, ridge at {shown}", color))
    _names_of_roofs(axes, names, right, math.log(top / bottom))
    first_peak, first_bandwidth = next(iter(roofs.values()))
    _points(axes, points, lambda x: min(first_peak, first_bandwidth * x) / 1e9)
    for label, x in marks.items():
        axes.axvline(x, color=MUTED, linestyle=":", linewidth=1.2)
        name(axes, x, bottom * (top / bottom) ** 0.05, label, MUTED, dx=4)
    if guess is not None:
        axes.plot(guess[0], guess[1] / 1e9, "D", color=INK, fillstyle="none", markersize=9)
        _beside(axes, guess[0], guess[1] / 1e9, "your guess", INK, 0)
    axes.set(xlabel=words[0], ylabel=words[1])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
        axis.set_minor_formatter("")
    show(figure, caption, alt)


def _names_of_roofs(
    axes: Axes, names: Sequence[tuple[float, str, str]], right: float, decades: float
) -> None:
    """Above the flat part of each, moved up where the one below is close; the lowest of several below it.

    More than three would lie on each other's lines: those stand at the ends of theirs, right of the axes.
    """
    low, outside = -math.inf, len(names) > 3
    for number, (peak, text, color) in enumerate(sorted(names)):
        place = HEIGHT * math.log(peak) / decades
        away = (-20 if number == 0 else 0) if outside else -9 if number == 0 and len(names) > 1 else 11
        low = max(place + away, low + 13)
        axes.annotate(
            text,
            (right, peak),
            xytext=(6 if outside else -4, low - place),
            textcoords="offset points",
            ha="left" if outside else "right",
            va="center",
            fontsize=9.5,
            color=color,
        )


def _points(axes: Axes, points: Mapping[str, Place], predicted: Callable[[float], float]) -> None:
    """A dot where it was measured, and a ring where the roof is."""
    for (label, (x, rate)), color in zip(points.items(), COLORS[1:], strict=False):
        axes.plot([x, x], [predicted(x), rate / 1e9], color=color, linewidth=1)
        axes.plot(x, predicted(x), "o", color=color, fillstyle="none", markersize=9)
        axes.plot(x, rate / 1e9, "o", color=color, markersize=6)
        if rate / 1e9 > 2 * predicted(x):
            _beside(axes, x, rate / 1e9, label, color, 2)
        else:  # below the roof, also where the dot is a little above it
            _beside(axes, x, min(rate / 1e9, predicted(x)), label, color, -9)


def _beside(axes: Axes, x: float, y: float, text: str, color: str, down: float) -> None:
    """At the right of a point, or at its left where there is no room on the right."""
    left, right = axes.get_xlim()
    late = math.log(x / left) > 0.75 * math.log(right / left)
    axes.annotate(
        text,
        (x, y),
        xytext=(-9 if late else 9, down),
        textcoords="offset points",
        ha="right" if late else "left",
        va="center",
        fontsize=9.5,
        color=color,
    )
