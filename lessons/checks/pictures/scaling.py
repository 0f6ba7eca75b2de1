"""How many times as fast several ranks are, with the model and the guess (lesson 10)."""

from __future__ import annotations

from collections.abc import Mapping

from checks.figures import BLUE, INK, MUTED, ORANGE, draw, name, said, show


def scaling_picture(
    measured: Mapping[int, float], model: Mapping[int, float], prediction: float | None
) -> None:
    """Show speed against ranks.

    Args:
        measured: seconds of a step by the number of ranks, 1 among them.
        model: the same, predicted.
        prediction: how many times as fast as one the most ranks are, or None.
    """
    ranks, most = list(measured), max(measured)
    found, thought = ([times[1] / times[n] for n in ranks] for times in (measured, model))
    figure, axes = draw(height=3.4)
    axes.plot(ranks, ranks, color=MUTED, linewidth=1, linestyle=":")
    name(axes, most, most, "perfect", MUTED)
    axes.plot(ranks, thought, "--", color=ORANGE)
    axes.plot(ranks, found, "o", color=BLUE)
    side = 7 if thought[-1] >= found[-1] else -7  # the higher one's name above, the other's below
    name(axes, most, thought[-1], "model", ORANGE, dx=9, dy=side)
    name(axes, most, found[-1], "measured", BLUE, dx=9, dy=-side)
    if prediction is not None:
        axes.plot(most, prediction, "D", color=INK, fillstyle="none", markersize=9)
        free = all(abs(prediction - each) > 0.4 for each in (most, thought[-1], found[-1]))
        name(axes, most, prediction, "your guess", INK, dx=9 if free else -72)  # right, where no name stands
    axes.set(xlabel="ranks", ylabel="times as fast as one", xticks=ranks, ylim=(0, None))
    show(
        figure,
        f"The same batch on more ranks, each with a device and a link of its own. {most} ranks are "
        f"{found[-1]:.1f} times as fast as one; {said(prediction)}.",
        alt="Speed against ranks: a dotted line for perfect scaling, a dashed one for the model, and "
        "measured dots.",
    )
