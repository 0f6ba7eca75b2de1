"""Who does what when in a pipeline: as a chart, and as an animation (lesson 12)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from checks.figures import BLUE, GREEN, INK, MUTED, ORANGE, PINK, RED, draw, name, show
from checks.support.animations import Scene, animate
from minidist.parallel.schedules import Event, Instruction, Schedule, simulate, with_messages

COLORS = {"forward": BLUE, "backward": RED, "backward_input": PINK, "backward_weight": GREEN}
WORDS = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward, input",
    "backward_weight": "backward, weights",
}
Timeline = Sequence[Sequence[Event]]
"""For each rank what it did, and when."""


def gantt(timelines: Mapping[str, Timeline], caption: str, alt: str, unit: str = "") -> None:
    """Show one chart above the other, a row a rank; a box has its micro-batch's number.

    Args:
        timelines: by name; all share the axis of time, and each begins at 0.
        caption, alt: as for `show`.
        unit: of the times.
    """
    from matplotlib.patches import Rectangle

    ranks = max(map(len, timelines.values()))
    charts = {key: _from_zero(timeline) for key, timeline in timelines.items()}
    end = max(event.end for chart in charts.values() for events in chart for event in events)
    figure, axes = draw(height=0.75 + len(charts) * (0.3 + 0.27 * ranks))
    base, ticks = 0.0, {}
    for key, chart in charts.items():
        axes.text(0, base - 0.62, key, fontsize=9.5, fontweight="bold", color=INK)
        for rank, events in enumerate(chart):
            ticks[base + rank] = f"rank {rank}"
            axes.hlines(base + rank, 0, end, color=MUTED, linewidth=0.6, zorder=1)
            for each, start, stop in events:
                color = COLORS[each.kind]
                box = Rectangle(
                    (start, base + rank - 0.4), stop - start, 0.8, facecolor=color, zorder=2, linewidth=0
                )
                axes.add_patch(box)
                if stop - start > end / 90:
                    axes.text(
                        (start + stop) / 2,
                        base + rank,
                        each.micro_batch,
                        ha="center",
                        va="center",
                        fontsize=7.5,
                        color="white",
                        zorder=3,
                    )
                    axes.vlines(stop, base + rank - 0.4, base + rank + 0.4, color="white", linewidth=0.8)
        base += ranks + 1.1
    kinds = {event.instruction.kind for chart in charts.values() for events in chart for event in events}
    place = 0.0
    for kind, words in WORDS.items():
        if kind in kinds:
            name(axes, place * end, base - 0.85, words, COLORS[kind], dx=0)
            place += 0.04 + 0.0165 * len(words)
    axes.set(xlim=(0, end * 1.005), ylim=(base - 0.4, -0.95), yticks=list(ticks))
    axes.set_yticklabels(ticks.values())
    axes.set_xlabel(f"time, {unit}" if unit else "time")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    show(figure, caption, alt)


def measured(events: Sequence[Sequence[Event]], scale: float = 1e3) -> list[list[Event]]:
    """What `Pipeline.timed` noted on each rank, without the messages, in milliseconds."""
    return [
        [Event(each, start * scale, end * scale) for each, start, end in rank if each.computes]
        for rank in events
    ]


def beside_formula(
    counts: Sequence[int],
    times: Sequence[float],
    models: Mapping[str, Sequence[float]],
    guess: float | None,
    caption: str,
) -> None:
    """Show milliseconds against micro-batches: measured as dots, and two models as dashed lines.

    Args:
        counts: of micro-batches; the first is 1, and 8 is among them.
        times: measured.
        models: by name.
        guess: how many times as fast as the first the reader takes 8 micro-batches to be, or None.
        caption: as for `show`.
    """
    figure, axes = draw(height=3.4)
    for (key, values), color, dy in zip(models.items(), (BLUE, GREEN), (-6, 6), strict=True):
        axes.plot(counts, values, "--", color=color, linewidth=1.2)
        name(axes, counts[-1], values[-1], key, color, dx=9, dy=dy)
    axes.plot(counts, times, "o", color=ORANGE)
    name(axes, counts[0], times[0], "measured", ORANGE, dx=9)
    if guess:
        axes.plot(8, times[0] / guess, "D", color=INK, fillstyle="none", markersize=9)
        name(axes, 8, times[0] / guess, "your guess", INK, dx=9)
    axes.set_xscale("log", base=2)
    axes.set(xticks=counts, xticklabels=counts, ylim=(0, None), xlabel="micro-batches", ylabel="milliseconds")
    show(
        figure,
        caption,
        alt="Time of a batch against its number of micro-batches: it falls steeply at first and then hardly, "
        "and the more micro-batches there are, the more it lies above the bubble's formula.",
    )


def _from_zero(timeline: Timeline) -> list[list[Event]]:
    first = min(event.start for events in timeline for event in events)
    return [[Event(each, start - first, end - first) for each, start, end in events] for events in timeline]


def fill_animation(schedules: Mapping[str, Schedule]) -> None:
    """Show schedules filling up side by side in time: forward passes take 1, backward passes 2.

    Args:
        schedules: by name, without messages; as many ranks each.
    """
    found = {key: simulate(with_messages(each)) for key, each in schedules.items()}
    end = max(each.seconds for each in found.values())
    left, right, row, height = 62, 96, 30, 24
    wide = (760 - left - right) / end
    ranks = len(next(iter(schedules.values())))
    scene = Scene(760, len(found) * (ranks * row + 40) + 4)
    boxes: list[tuple[str, float, float, float, float, Instruction, int]] = []
    holds: list[tuple[str, str, int, float, float]] = []
    top = 34
    for key, each in found.items():
        scene.label(left, top - 12, key, anchor="start")
        scene.label(760 - right / 2 + 4, top - 12, "holds", size=12)
        for rank, events in enumerate(each.timeline):
            y = top + rank * row
            scene.label(left - 8, y + height / 2 + 5, f"rank {rank}", size=12, anchor="end")
            scene.still(
                f'<rect x="{left}" y="{y}" width="{wide * end}" height="{height}" fill="currentColor" '
                'opacity="0.08"/>'
            )
            block = f"{key} holds {rank}"
            scene.block(block, 30, height, PINK)
            holds.append((block, key, rank, 760 - right / 2 - 11, y))
            for instruction, start, stop in events:
                box = f"{key} {rank} {instruction}"
                scene.block(box, (stop - start) * wide - 1.5, height, COLORS[instruction.kind])
                boxes.append((box, start, stop, left + start * wide, y, instruction, rank))
        top += ranks * row + 40
    for now in range(round(end)):
        places = {
            box: (x, y, instruction.micro_batch, start <= now < stop)
            for box, start, stop, x, y, instruction, _ in boxes
            if start <= now
        }
        live = {(key, rank): 0 for _, key, rank, _, _ in holds}
        for box, start, stop, _, _, instruction, rank in boxes:
            key = next(key for key in found if box.startswith(f"{key} {rank} "))
            live[key, rank] += instruction.kind == "forward" and start <= now
            live[key, rank] -= instruction.kind == "backward" and stop <= now
        places |= {block: (x, y, live[key, rank]) for block, key, rank, x, y in holds}
        scene.frame(_note(now, found, live, ranks), places)
    animate(
        scene,
        "Blue: forward. Red: backward. A box has its micro-batch's number, and an outline while it runs. "
        "A rank holds a micro-batch's activations from its forward to the end of its backward pass.",
        alt="Two charts that fill from left to right. In both the first micro-batch reaches the last rank "
        "after three steps. GPipe then goes on with forward passes, and rank 0 comes to hold all "
        "micro-batches; 1F1B starts backward passes at once, and rank 0 never holds more than four.",
        pause=900,
    )


def _note(now: int, found: Mapping[str, object], live: Mapping[tuple[str, int], int], ranks: int) -> str:
    held = "; ".join(f"{key}: {max(live[key, rank] for rank in range(ranks))} at most" for key in found)
    return f"Time {now}. Micro-batches that a rank holds: {held}."
