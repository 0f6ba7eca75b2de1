"""Descent by late gradients, and learning curves (lesson 11)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from checks.figures import BLUE, COLORS, INK, draw, name, show


def trajectories(paths: Mapping[str, Sequence[float]], caption: str) -> None:
    """Show x over updates, a line a delay; what leaves -2 to 2 is cut off."""
    figure, axes = draw(height=3.2)
    axes.axhline(0, color=INK, linewidth=0.8)
    longest = 0
    for (key, path), color in zip(paths.items(), COLORS, strict=False):
        axes.plot(path, color=color, linewidth=1.6)
        inside = [i for i, x in enumerate(path) if abs(x) <= 2]
        longest = max(longest, len(path))
        last = next((i for i, x in enumerate(path) if abs(x) > 2), None)
        if last is None:
            dy = -9 if key.endswith(" 0") else 9
            name(axes, inside[-1], path[inside[-1]], key, color, dx=5, dy=dy)
        else:
            name(axes, last, 1.85 if path[last] > 0 else -1.85, key, color, dx=5)
    axes.set(xlim=(0, longest), ylim=(-2, 2), xlabel="updates", ylabel="x")
    show(
        figure,
        caption,
        alt="Without delay x goes straight to 0. With a small delay it swings about 0 and settles. With a "
        "large one it swings wider and wider.",
    )


def bounds_chart(
    delays: Sequence[int], found: Sequence[float], formula: Sequence[float], guess: float | None, caption: str
) -> None:
    """Show the largest stable lr against the delay: found as dots, the formula dashed, the guess at 3."""
    figure, axes = draw(height=3.2)
    axes.plot(delays, formula, "--", color=BLUE, linewidth=1.2)
    axes.plot(delays, found, "o", color=BLUE)
    name(axes, delays[1], formula[1], "formula (dashed), tried out (dots)", BLUE, dx=9, dy=6)
    if guess:
        axes.plot(3, guess, "D", color=INK, fillstyle="none", markersize=9)
        name(axes, 3, guess, "your guess", INK, dx=9)
    axes.set(xlabel="updates that a gradient is late", ylabel="largest lr x curvature", ylim=(0, None))
    show(
        figure,
        caption,
        alt="The largest stable learning rate falls from 2 without delay to 1 with a delay of 1, and on in "
        "proportion to about one over the delay; dots lie on the formula's line.",
    )


def learning(curves: Mapping[str, Sequence[tuple[int, float, float]]], caption: str) -> None:
    """Show losses twice: against seconds, and against updates.

    Args:
        curves: by name, (updates, seconds, loss).
        caption: as for `show`.
    """
    figure, (left, right) = draw(height=3.4, columns=2, sharey=True)
    shortest = min(curve[-1][0] for curve in curves.values())
    for row, ((key, curve), color) in enumerate(zip(curves.items(), COLORS, strict=False)):
        updates, seconds, losses = zip(*curve, strict=True)
        left.plot(seconds, losses, color=color, linewidth=1.2)
        shown = [i for i, made in enumerate(updates) if made <= shortest]
        right.plot([updates[i] for i in shown], [losses[i] for i in shown], color=color, linewidth=1.2)
        place = {"xycoords": "axes fraction", "fontsize": 9.5, "color": color}
        left.annotate(key, (0.98, 0.95 - 0.075 * row), ha="right", **place)
        right.annotate(key, (0.03, 0.2 - 0.075 * row), **place)  # the few updates do not reach the ground
    left.set(xlabel="seconds", ylabel="loss", ylim=(0, None))
    right.set(xlabel="updates")
    right.xaxis.get_major_locator().set_params(integer=True)
    show(
        figure,
        caption,
        alt="Left, against seconds: the asynchronous curve falls fastest, the synchronous one slowest. "
        "Right, against updates: the curves are close, with the synchronous one lowest.",
    )
