"""Layouts: which ranks work together, what each sends, and what failures cost (lesson 15)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from checks.figures import BLUE, COLORS, INK, ORANGE, draw, name, show
from checks.support.animations import Scene, animate

RANKS = range(8)
LETTERS = "ABCD"


def mesh_animation() -> None:
    """Eight ranks on two hosts as pp=2, dp=2, tp=2: the groups along each axis, one after the other."""
    scene = Scene(660, 190)
    for host in range(2):
        x = 10 + 330 * host
        scene.label(x + 155, 20, f"host {host}")
        scene.still(
            f'<rect x="{x}" y="30" width="310" height="150" rx="8" fill="none" stroke="currentColor"/>'
        )
    for rank in RANKS:
        for color in range(4):
            scene.block(f"{rank} {color}", 134, 54, COLORS[color])
    at = {rank: (24 + 330 * (rank // 4) + 148 * (rank % 2), 44 + 68 * (rank % 4 // 2)) for rank in RANKS}
    places = {rank: f"pp {rank // 4}, dp {rank // 2 % 2}, tp {rank % 2}" for rank in RANKS}
    scene.frame(
        "The place of each rank: tp counts fastest, then dp, then pp. (cp is 1 here, and not shown.)",
        {f"{rank} 0": (*at[rank], f"{rank}: {places[rank]}") for rank in RANKS},
    )
    for stride, note in (
        (1, "tp: four groups of neighbours on one host. They send messages in each block of the model."),
        (2, "dp: each rank and the rank two further on. They sum gradients, once in a step."),
        (4, "pp: each rank and the rank four further on. Only these messages leave the host."),
    ):
        group = {rank: rank // (2 * stride) * stride + rank % stride for rank in RANKS}
        scene.frame(
            note,
            {f"{r} {group[r]}": (*at[r], f"rank {r}: group {LETTERS[group[r]]}") for r in RANKS},
        )
    animate(
        scene,
        "Eight ranks as Layout(pp=2, dp=2, tp=2). A group has one colour and one letter.",
        alt="Two hosts with four ranks each. Groups of tensor parallelism are ranks 0 and 1, 2 and 3, and so "
        "on; of data parallelism ranks 0 and 2, 1 and 3; of the pipeline ranks 0 and 4, 1 and 5, on "
        "different hosts.",
        pause=3000,
    )


def bytes_figure(
    measured: Mapping[str, float],
    model: Mapping[str, float],
    guess: tuple[str, float] | None,
    caption: str,
) -> None:
    """Bytes that a rank sends in a step: bars are counted, lines are the model, a diamond is the guess."""
    figure, axes = draw(height=0.9 + 0.46 * len(measured))
    for row, (layout, count) in enumerate(measured.items()):
        axes.barh(row, count / 1e6, height=0.5, color=BLUE)
        axes.plot([model[layout] / 1e6] * 2, [row - 0.38, row + 0.38], color=ORANGE, linewidth=3)
        name(axes, max(count, model[layout]) / 1e6, row, f"{count / 1e6:.2f}")
        if guess is not None and guess[0] == layout:
            axes.plot(guess[1] / 1e6, row, "D", color=INK, fillstyle="none", markersize=9, clip_on=False)
            name(axes, guess[1] / 1e6, row, "your guess", INK, dx=0, dy=-15)
    most = max(*measured.values(), *model.values(), guess[1] if guess else 0)
    axes.set_xlim(0, most / 1e6 * 1.15)
    axes.set_yticks(range(len(measured)), list(measured))
    axes.set_ylim(len(measured) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("MB that a rank sends in a step: counted (bar), and by your formula (line)")
    show(
        figure,
        caption,
        alt="A bar for each layout: tensor parallelism sends most, the pipeline least; the formula's lines "
        "stand near the bars' ends.",
    )


def lost_figure(
    minutes: Sequence[float],
    simulated: Sequence[float],
    model: Sequence[float],
    best: float,
    caption: str,
) -> None:
    """The share of time that is lost, against the time from one checkpoint to the next."""
    figure, axes = draw(height=3.2)
    axes.plot(minutes, [100 * share for share in model], color=ORANGE, linewidth=1.6)
    axes.plot(minutes, [100 * share for share in simulated], "o", color=BLUE)
    axes.axvline(best, color=INK, linewidth=1, linestyle=":")
    name(axes, best, axes.get_ylim()[1] * 0.94, "Young's", INK)
    name(axes, minutes[-1], 100 * model[-1], "model", ORANGE, dy=7)
    name(axes, minutes[-1], 100 * simulated[-1], "simulated", BLUE, dx=9, dy=-9)
    axes.set(xscale="log", ylim=(0, None))
    axes.set_xticks(minutes, [f"{each:g}" for each in minutes])
    axes.minorticks_off()
    axes.set(xlabel="minutes from one checkpoint to the next", ylabel="% of the time lost")
    show(
        figure,
        caption,
        alt="A curve that falls, has its lowest point near Young's interval, and rises again.",
    )
