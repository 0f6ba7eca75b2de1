"""A rank's memory as stacked bars, one for each layout.

Where there are measurements, each estimated bar is hatched and its measured one stands next to it. The
colours are Okabe and Ito's, which people with any colour vision can tell apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING

from minidist.parallel.contract.memory_report import PARTS, Memory, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "activations": "#CC79A7",
    "buffers": "#707070",
}
LEAST = 0.055
"""Share of the axis's height below which a part has no room for its number."""


def plot(
    estimates: Mapping[str, Memory],
    path: str | PathLike[str] | None = None,
    measured: Mapping[str, Memory] | None = None,
    title: str = "",
) -> Axes:
    """Draw a stacked bar for each layout, and next to it the measured one.

    >>> plot({f"ZeRO-{z}": estimate("gpt2-small", Layout(dp=8, zero=z)) for z in range(4)}, "memory.png")

    Args:
        estimates: bytes of a rank by the layout's name.
        path: a file to write, such as a .png or .svg; None to write none.
        measured: what `engine.memory()` returned, for some of the same names.
        title: text above the figure.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: there is nothing to draw, `measured` has a name that `estimates` lacks, or `path` is not a
            file's.
    """
    if path is not None:
        check_path(path)
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'minidist[bench]'") from error
    measured = measured or {}
    if not estimates or not measured.keys() <= estimates.keys():
        raise ValueError(
            f"estimates are for {', '.join(estimates) or 'nothing'} and measured for "
            f"{', '.join(measured) or 'nothing'}; give one bar or more, and measured ones for the same names"
        )
    with matplotlib.style.context("default"):  # a dark theme's text would not suit these colours
        slots = len(estimates) + len(measured)
        figure = Figure(figsize=(max(5.2, 2.2 + 0.85 * slots), 4.4), layout="constrained")
        axes = figure.subplots()
        _draw(axes, estimates, measured, title)
        if path is not None:
            figure.savefig(path, dpi=150)
    return axes


def check_path(path: str | PathLike[str]) -> None:
    """ValueError if `path` is a directory or empty, since matplotlib would write a hidden file there."""
    text = os.fspath(path)
    if not os.path.basename(text) or os.path.isdir(text):
        what = "a directory" if text else "no name"
        raise ValueError(f"plot to {text!r}, which is {what}; give a file, such as memory.png")


def _draw(axes: Axes, estimates: Mapping[str, Memory], measured: Mapping[str, Memory], title: str) -> None:
    from matplotlib.patches import Patch

    from minidist.kernels.measure.roofline_plot import GRID, MUTED

    highest = max(bar.total for bar in (*estimates.values(), *measured.values()))
    unit = size(highest).split()[1]  # the highest bar's
    scale = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]
    top = 1.12 * max(highest, 1) / scale
    width, drawn = (0.4, 0.42) if measured else (0.62, 0.0)
    for x, (name, bar) in enumerate(estimates.items()):
        other = measured.get(name)
        _bar(axes, x - (drawn / 2 if other else 0), width, bar, scale, top, hatched=bool(measured))
        if other is not None:
            _bar(axes, x + drawn / 2, width, other, scale, top, hatched=False)
    axes.set_xticks(range(len(estimates)), list(estimates))
    axes.set(ylim=(0, top), xlim=(-0.55, len(estimates) - 0.45), ylabel=f"{unit} on each rank")
    axes.set_title(title, loc="left", fontsize=10, color=MUTED)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    shown = [p for p in PARTS if any(getattr(b, p) for b in (*estimates.values(), *measured.values()))]
    keys = [Patch(facecolor=COLORS[part], edgecolor="white", label=part) for part in reversed(shown)]
    if measured:
        keys.append(Patch(facecolor="#d8d8d8", edgecolor="white", hatch="///", label="estimated"))
        keys.append(Patch(facecolor="#d8d8d8", edgecolor="white", label="measured"))
    axes.figure.canvas.figure.legend(handles=keys, loc="outside right upper", frameon=False, fontsize=9)


def _bar(axes: Axes, x: float, width: float, bar: Memory, scale: float, top: float, hatched: bool) -> None:
    """Draw one bar: its parts from the bottom, each with its number if there is room, and the total above."""
    bottom, hatch = 0.0, "///" if hatched else None
    digits = f",.{0 if top >= 200 else 1 if top >= 20 else 2}f"  # that suit the axis
    for part in PARTS:
        height, color = getattr(bar, part) / scale, COLORS[part]
        if not height:
            continue
        axes.bar(x, height, width, bottom, color=color, edgecolor="white", linewidth=0.8, hatch=hatch)
        if height / top > LEAST:
            ink = "black" if part in ("gradients", "activations") else "white"
            box = {"facecolor": color, "edgecolor": "none", "pad": 1.0}
            at = x, bottom + height / 2
            axes.text(*at, f"{height:{digits}}", ha="center", va="center", fontsize=8, color=ink, bbox=box)
        bottom += height
    at = x, bottom + 0.012 * top
    axes.text(*at, f"{bottom:{digits}}", ha="center", va="bottom", fontsize=9, weight="bold")
