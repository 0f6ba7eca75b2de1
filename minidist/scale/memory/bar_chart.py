"""A rank's memory as stacked bars, one a layout: what each stage of ZeRO takes away is seen at a glance.

Measured bars stand beside estimated ones, hatched, so that both are read off one axis. Colours are those of
Okabe and Ito, which people with any colour vision tell apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING

from minidist.kernels.measure.roofline_plot import GRID, MUTED
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
"""Of the axis's height: a lower part has no room for its bytes in letters."""


def plot(
    estimates: Mapping[str, Memory],
    path: str | PathLike[str] | None = None,
    measured: Mapping[str, Memory] | None = None,
    title: str = "",
) -> Axes:
    """Draw a stacked bar for each layout, and beside it what was measured.

    >>> plot({f"ZeRO-{z}": estimate("gpt2-small", Layout(dp=8, zero=z)) for z in range(4)}, "memory.png")

    Args:
        estimates: for the name of each layout the bytes of a rank, estimated or measured.
        path: a file to write, such as a .png or .svg; None for none.
        measured: for some of the same names what `engine.memory()` gave.
        title: above the figure.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: there is nothing to draw, `measured` has a name that `estimates` lacks, or `path` names no
            file.
    """
    if path is not None:
        check_path(path)
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("matplotlib is missing, which draws: pip install 'minidist[bench]'") from error
    measured = measured or {}
    if not estimates or not measured.keys() <= estimates.keys():
        raise ValueError(
            f"estimates are for {', '.join(estimates) or 'nothing'} and measured for "
            f"{', '.join(measured) or 'nothing'}; give one bar or more, and measured ones for the same names"
        )
    with matplotlib.style.context("default"):  # a dark theme has colours that are not for this one
        slots = len(estimates) + len(measured)
        figure = Figure(figsize=(max(5.2, 2.2 + 0.85 * slots), 4.4), layout="constrained")
        axes = figure.subplots()
        _draw(axes, estimates, measured, title)
        if path is not None:
            figure.savefig(path, dpi=150)
    return axes


def check_path(path: str | PathLike[str]) -> None:
    """ValueError where `path` names no file: matplotlib writes a hidden one to a directory's name."""
    text = os.fspath(path)
    if not os.path.basename(text) or os.path.isdir(text):
        what = "a directory" if text else "no name"
        raise ValueError(f"plot to {text!r}, which is {what}; give a file, such as memory.png")


def _draw(axes: Axes, estimates: Mapping[str, Memory], measured: Mapping[str, Memory], title: str) -> None:
    from matplotlib.patches import Patch

    highest = max(bar.total for bar in (*estimates.values(), *measured.values()))
    unit, scale = _unit(highest)
    top = 1.12 * max(highest, 1) / scale
    width, drawn = (0.4, 0.42) if measured else (0.62, 0.0)
    for place, (name, bar) in enumerate(estimates.items()):
        beside = measured.get(name)
        _bar(axes, place - (drawn / 2 if beside else 0), width, bar, scale, top, hatched=bool(measured))
        if beside is not None:
            _bar(axes, place + drawn / 2, width, beside, scale, top, hatched=False)
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
    """One bar: its parts from the bottom, each with its bytes where there is room, and the total above."""
    bottom = 0.0
    for part in PARTS:
        height = getattr(bar, part) / scale
        if not height:
            continue
        axes.bar(
            x,
            height,
            width,
            bottom,
            color=COLORS[part],
            edgecolor="white",
            linewidth=0.8,
            hatch="///" if hatched else None,
        )
        if height / top > LEAST:
            axes.text(
                x,
                bottom + height / 2,
                _number(height, top),
                ha="center",
                va="center",
                fontsize=8,
                color="black" if part in ("gradients", "activations") else "white",
                bbox={"facecolor": COLORS[part], "edgecolor": "none", "pad": 1.0},
            )
        bottom += height
    axes.text(
        x, bottom + 0.012 * top, _number(bottom, top), ha="center", va="bottom", fontsize=9, weight="bold"
    )


def _unit(highest: float) -> tuple[str, float]:
    """The unit of an axis, and its bytes: that in which the highest bar is written."""
    scales = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    unit = size(highest).split()[1]
    return unit, scales[unit]


def _number(x: float, top: float) -> str:
    """With as many decimals as all numbers on an axis that ends at `top`."""
    return f"{x:,.{0 if top >= 200 else 1 if top >= 20 else 2}f}"
