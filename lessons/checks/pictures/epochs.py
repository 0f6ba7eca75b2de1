"""What an epoch takes with each matmul: measured, and by the model (lesson 7)."""

from __future__ import annotations

from collections.abc import Mapping

from checks.figures import BLUE, GREEN, INK, ORANGE, draw, name, said, show

SLOW, FAST = "s3_compiled", "s6_register_tile"


def epochs_picture(
    measured: Mapping[str, float], model: Mapping[str, float], rest: float, prediction: float | None
) -> None:
    """Show it, in milliseconds; all arguments in seconds but the prediction, how many times FAST is SLOW.

    Args:
        measured: an epoch's time by matmul.
        model: the same, predicted.
        rest: all of an epoch but the products.
        prediction: the reader's guess, or None.
    """
    rows = list(measured)
    if prediction:  # in a row of its own, below what it is about
        rows.insert(1 + rows.index(FAST), "your guess")
    figure, axes = draw(height=1.3 + 0.38 * len(rows))
    for row, label in enumerate(rows):
        if label not in measured:
            guess = 1e3 * measured[SLOW] / (prediction or 1)
            axes.plot(guess, row, "D", color=INK, fillstyle="none", markersize=9)
            name(axes, guess, row, f"{guess:,.1f}", dx=9)
            continue
        mine, right = 1e3 * measured[label], 1e3 * model[label]
        axes.barh(row, mine, height=0.55, color=BLUE)
        axes.plot([right, right], [row - 0.36, row + 0.36], color=ORANGE, linewidth=2.5)
        name(axes, max(mine, right), row, f"{mine:,.1f}")
    axes.axvline(1e3 * rest, color=GREEN, linestyle="--", linewidth=1.2)
    name(axes, 1e3 * rest, -0.8, "all but the products", GREEN)
    axes.set(xscale="log", xlabel="milliseconds an epoch", ylim=(len(rows) - 0.4, -1.2))
    axes.set_xlim(1e3 * min(rest, measured[SLOW] / (prediction or 1)) / 2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    show(
        figure,
        "Bars are measured; an orange mark is the model: all but the products, and 6 FLOPs for each "
        "parameter "
        f"and row. An epoch on rung 6 is {measured[SLOW] / measured[FAST]:.1f} times as fast as on rung 3; "
        f"{said(prediction)}.",
        alt="A bar for each matmul. For slow ones it is as long as the products take; for fast ones it ends "
        "near the dashed line of all that is no product.",
    )
