"""Draw rooflines and the points on them, both axes logarithmic.

A line joins the points of a product at several sizes. All names stand in one column beside the axes, where
nothing else is drawn, at the height of what they name, or further down if they would overlap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from .peaks import Peaks, Roof
from .points import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (9, 5)  # inches
MUTED, GRID = "#707070", "#e4e4e4"
COLORS_OF_ROOFS = ("#1f3a5f", "#a23b2a", "#2c6e49")  # one core, all cores, GPU
DASHES = ("-", "--", ":", "-.")  # of the dtypes, where several are drawn
# Okabe and Ito's colours, which people with any colour vision tell apart; yellow is too light for letters.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")


def draw(
    peaks: Peaks,
    points: Sequence[Point],
    dtype: str,
    path: str | PathLike[str] | None,
    axes: Axes | None,
) -> Axes:
    """Draw as `roofline.plot` says; raise ImportError with the remedy if matplotlib is missing."""
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("matplotlib is missing, which draws: pip install 'minidist[bench]'") from error
    roofs = _roofs(peaks, points, dtype)
    if axes is not None:
        _draw(axes, peaks, points, roofs)
    else:
        with matplotlib.style.context("default"):  # a dark theme would clash with these colours
            if path is not None:
                axes = Figure(figsize=SIZE, layout="constrained").subplots()  # not registered in pyplot
            else:
                import matplotlib.pyplot as plt

                axes = plt.subplots(figsize=SIZE, layout="constrained")[1]
            _draw(axes, peaks, points, roofs)
    if path is not None:
        axes.figure.canvas.figure.savefig(path, dpi=150)
    return axes


def _draw(axes: Axes, peaks: Peaks, points: Sequence[Point], roofs: list[tuple[Roof, str]]) -> None:
    left = min([0.1, *(point.intensity / 4 for point in points)])
    right = max([100, *(10 * roof.ridge(kind) for roof, kind in roofs), *(2 * x.intensity for x in points)])
    bottom = min(
        [*(roof.attainable(left, kind) / 2 for roof, kind in roofs), *(point.rate / 4 for point in points)]
    )
    top = 2 * max([*(roof.peak(kind) for roof, kind in roofs), *(point.rate for point in points)])
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom / 1e9, top / 1e9))
    axes.set(xlabel="arithmetic intensity, FLOP/byte", ylabel="GFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}")  # 0.01, not 10^-2
    on_cpu = any(roof is not peaks.gpu for roof, _ in roofs)
    title = f"{peaks.machine}, {peaks.vector_unit}" if on_cpu else roofs[0][0].name
    axes.set_title(title, loc="left", fontsize=10, color=MUTED)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    alone = len({roof.name for roof, _ in roofs}) == 1  # then points need not name their roof
    names = _draw_roofs(axes, roofs) + _draw_points(axes, points, alone)
    sizes = _draw_sizes(axes, points)
    axes.figure.canvas.figure.draw_without_rendering()  # settles where everything is, in pixels
    _move_apart(axes, names)
    _stack(sizes)


def _roofs(peaks: Peaks, points: Sequence[Point], dtype: str) -> list[tuple[Roof, str]]:
    """Return what to draw: without points all roofs, else the CPU's, the GPU's or both.

    A CPU's matrix unit multiplies float32 too, rounded or in parts: its ceiling stands beside float32's.
    """
    kinds = sorted({point.dtype for point in points}, key=lambda kind: (kind == "bfloat16", kind)) or [dtype]
    on_gpu = {peaks.gpu is not None and point.roof.name == peaks.gpu.name for point in points}
    wanted = [roof for roof in peaks.roofs if not points or (roof is peaks.gpu) in on_gpu]
    ceiling = ["bfloat16"] if "float32" in kinds and "bfloat16" not in kinds else []
    found = [
        (roof, kind)
        for roof in wanted
        for kind in (kinds if roof is peaks.gpu else kinds + ceiling)
        if kind in roof.flops
    ]
    if not found:
        wanted[0].peak(kinds[0])  # raises, with the dtypes that there are
    return found


def _draw_roofs(axes: Axes, roofs: list[tuple[Roof, str]]) -> list[Any]:
    """Draw the lines, a ring at each ridge, and the bandwidths; return the names."""
    left, right = axes.get_xlim()
    kinds = list(dict.fromkeys(kind for _, kind in roofs))
    slopes = {roof.name: roof.bandwidth / 1e9 for roof, _ in roofs}
    colors = dict(zip(slopes, COLORS_OF_ROOFS, strict=False))
    names = []
    for roof, kind in roofs:
        color = colors[roof.name]
        xs = [left, roof.ridge(kind), right]
        ys = [roof.attainable(x, kind) / 1e9 for x in xs]
        label = f"{roof.name}, {kind}" if len(kinds) > 1 else roof.name
        dashes = DASHES[kinds.index(kind) % len(DASHES)]
        axes.plot(xs, ys, dashes, color=color, linewidth=1.8, label=label)
        axes.plot(xs[1:2], ys[1:2], "o", color="white", markeredgecolor=color, markersize=5)
        text = f"{label}: {_number(ys[1])} GFLOP/s, ridge at {_number(xs[1])} FLOP/byte"
        names.append(_name(axes, text, right, ys[1], color))
    for label, bandwidth in slopes.items():
        lowest = len(slopes) > 1 and bandwidth == min(slopes.values())
        axes.text(
            1.25 * left,
            1.25 * left * bandwidth * (0.82 if lowest else 1.1),
            f"{_number(bandwidth)} GB/s",
            rotation=math.degrees(math.atan(bandwidth)),  # in data; the transform makes it the page's
            transform_rotates_text=True,
            rotation_mode="anchor",
            va="top" if lowest else "bottom",
            color=colors[label],
            fontsize=9,
        )
    return names


def _draw_points(axes: Axes, points: Sequence[Point], alone: bool) -> list[Any]:
    """Draw a line for each product, with a mark for each size; return the names."""
    kinds = {point.dtype for point in points}
    lines: dict[str, list[Point]] = {}
    for point in points:
        words = [point.name]
        words += [point.dtype] if len(kinds) > 1 else []
        words += [] if alone or point.roof.name == "one core" else [point.roof.name]
        lines.setdefault(", ".join(words), []).append(point)
    names = []
    for index, (label, line) in enumerate(lines.items()):
        line = sorted(line, key=lambda point: point.intensity)
        xs, ys = [point.intensity for point in line], [point.rate / 1e9 for point in line]
        color = COLORS[index % len(COLORS)]
        marker = MARKERS[(index + index // len(COLORS)) % len(MARKERS)]  # another where colours come again
        axes.plot(xs, ys, marker=marker, color=color, linewidth=1, markersize=6, label=label, zorder=3)
        share = 100 * line[-1].share
        percent = f"{share:.0f}%" if share >= 10 else f"{share:.2g}%"
        text = f"{label}: {_number(ys[-1])} GFLOP/s, {percent}"
        names.append(_name(axes, text, xs[-1], ys[-1], color))
    return names


def _draw_sizes(axes: Axes, points: Sequence[Point]) -> list[Any]:
    """Write n below the points of n x n x n, and other shapes in full; return the texts from the left."""
    found: dict[tuple[float, tuple[int, int, int]], str] = {}
    for point in sorted(points, key=lambda point: point.intensity):
        sizes = (point.m, point.n, point.k)
        cube = f"{point.n}" if any(text.startswith("n") for text in found.values()) else f"n={point.n}"
        found.setdefault(
            (point.intensity, sizes), cube if len(set(sizes)) == 1 else "{}x{}x{}".format(*sizes)
        )
    return [
        axes.annotate(
            text,
            (x, 0),
            (0, 4),
            xycoords=axes.get_xaxis_transform(),  # x in data, y in axes
            textcoords="offset points",
            ha="center",
            va="bottom",
            color=MUTED,
            fontsize=9,
        )
        for (x, _), text in found.items()
    ]


def _name(axes: Axes, text: str, x: float, y: float, color: str) -> Any:
    """Write beside the axes at the height of (x, y), and connect the two."""
    return axes.annotate(
        text,
        (x, y),
        (1.02, y),
        textcoords=axes.get_yaxis_transform(),  # x in axes, y in data
        va="center",
        color=color,
        fontsize=9,
        annotation_clip=False,
        arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.6, "relpos": (0, 0.5)},
    )


def _number(x: float) -> str:
    """Return three digits, or all before the point: "0.0123", "1.23", "1,234"."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _move_apart(axes: Axes, names: Sequence[Any]) -> None:
    """Move names down, from the top one on, until none overlaps the one above it."""
    apart = 1.1 * max(name.get_window_extent().height for name in names)
    ceiling = math.inf
    for name in sorted(names, key=lambda name: name.get_position()[1], reverse=True):
        x, y = name.get_position()
        height = min(axes.transData.transform((1, y))[1], ceiling)
        name.set_position((x, axes.transData.inverted().transform((1, height))[1]))
        ceiling = height - apart


def _stack(texts: Sequence[Any]) -> None:
    """Move texts, which come from the left, up by a row if they would overlap one before them."""
    ends: list[float] = []  # of each row, in pixels
    for text in texts:
        box = text.get_window_extent()
        row = next((i for i, end in enumerate(ends) if end + 4 < box.x0), len(ends))
        ends[row : row + 1] = [box.x1]
        text.set_position((0, text.get_position()[1] + row * 1.2 * text.get_fontsize()))
