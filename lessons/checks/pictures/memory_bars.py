"""Bytes of a rank as stacked bars, one a stage of ZeRO (lesson 14)."""

from __future__ import annotations

from collections.abc import Mapping

from checks.figures import BLUE, GREEN, INK, ORANGE, draw, name, show
from minidist.parallel.contract.memory_report import size

PARTS = {"parameters": BLUE, "gradients": ORANGE, "optimizer": GREEN}


def memory_bars(
    bars: Mapping[str, Mapping[str, float]],
    caption: str,
    alt: str,
    predicted: Mapping[str, float] | None = None,
    guess: float | None = None,
    limit: tuple[float, str] | None = None,
) -> None:
    """Show them from top to bottom.

    Args:
        bars: by name, the bytes of each of PARTS.
        caption, alt: as for `figures.show`.
        predicted: by the same names, the bytes of a whole bar, drawn dashed.
        guess: bytes that the reader guessed for the last bar.
        limit: bytes that there are, and what has them.
    """
    figure, axes = draw(height=0.9 + 0.55 * (len(bars) + 0.6 * bool(guess)))
    totals = [sum(parts.values()) for parts in bars.values()]
    most = max([*totals, *(predicted or {}).values()])
    scale, unit = next(((s, u) for s, u in ((1e9, "GB"), (1e6, "MB")) if most >= s), (1e3, "kB"))
    for row, (bar, parts) in enumerate(bars.items()):
        left = 0.0
        for part, color in PARTS.items():
            width = parts[part] / scale
            axes.barh(row, width, left=left, height=0.62, color=color, linewidth=0)
            if row == 0:
                middle = left + width / 2
                axes.text(middle, -0.5, part, color=color, ha="center", va="bottom", fontsize=9.5)
            left += width
        model = predicted[bar] / scale if predicted else 0.0
        if predicted:
            outline = {"fill": False, "edgecolor": INK, "linestyle": "--", "linewidth": 1.3}
            axes.barh(row, model, height=0.8, **outline)
        name(axes, max(left, model), row, size(left * scale), INK)
    if guess:  # in a row of its own, below the bar that it is about
        axes.plot(guess / scale, len(bars) - 0.25, "D", color=INK, fillstyle="none", markersize=9)
        name(axes, guess / scale, len(bars) - 0.25, f"your guess for {list(bars)[-1]}", INK, dx=9)
    if limit:
        axes.plot([limit[0] / scale] * 2, [-0.4, len(bars) - 0.5], color=INK, linestyle=":", linewidth=1.3)
        name(axes, limit[0] / scale, len(bars) - 1, limit[1], INK)
    axes.set(xlabel=f"{unit} on each rank", yticks=range(len(bars)), yticklabels=list(bars))
    axes.set_ylim(len(bars) + 0.1 if guess else len(bars) - 0.5, -0.85)
    axes.set_xlim(0, most / scale * 1.12)
    axes.spines["left"].set_visible(False)  # it would cut the name of a narrow first part
    axes.grid(visible=False, axis="y")
    show(figure, caption, alt)
