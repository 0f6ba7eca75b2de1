"""What recomputation keeps, against the length of its segments (lesson 14)."""

from __future__ import annotations

from collections.abc import Sequence

from checks.figures import BLUE, INK, MUTED, draw, name, said, show


def segment_curve(
    lengths: Sequence[int],
    measured: Sequence[float],
    model: Sequence[float],
    guess: float | None,
    without: float,
) -> None:
    """Show tensors that are kept: measured as dots, L / k + k dashed, and what is kept without."""
    figure, axes = draw(height=3.2)
    axes.plot(lengths, model, "--", color=BLUE, linewidth=1.3)
    axes.plot(lengths, measured, "o", color=BLUE)
    name(axes, lengths[-1], measured[-1], "measured", BLUE, dx=8, dy=-10)
    name(axes, lengths[-1], model[-1], "L / k + k", BLUE, dx=8, dy=6)
    axes.axhline(without, color=MUTED, linewidth=1)
    name(axes, lengths[3], without, "without recomputation", INK, dx=0, dy=-8)
    least = min(range(len(lengths)), key=lambda i: measured[i])
    if guess is not None:
        axes.axvline(guess, color=INK, linestyle=":")
        name(axes, guess, without * 0.7, "your guess", INK)
    axes.set(xscale="log", xlabel="layers in a segment, k", ylabel="tensors kept")
    axes.set_xlim(lengths[0] / 1.07, lengths[-1] * 1.04)  # names of the lines stand outside
    axes.set_xticks(list(lengths), [str(each) for each in lengths])
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, None)
    show(
        figure,
        f"Dots are measured, the dashed line is the model. Segments of {lengths[least]} layers keep the "
        f"fewest tensors, {measured[least]:.0f}; {said(guess)}.",
        alt="Tensors kept against the length of a segment: many with very short and very long segments, "
        "and the fewest between.",
    )
