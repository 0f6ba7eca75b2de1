"""What computes and what is sent, and when, in three ways to average gradients (lesson 10)."""

from __future__ import annotations

from checks.figures import BLUE, INK, ORANGE, SKY, draw, show

FORWARD, BACKWARD = 3.0, (1.5, 1.5, 1.5, 1.5)  # backward begins with the last layer
LATENCY, BYTES = 0.55, 0.55  # of a message; the bytes are those of a layer

WAYS = {
    "a message each,\nafter backward": ([1, 1, 1, 1], False),
    "two buckets,\nafter backward": ([2, 2], False),
    "two buckets,\nin backward": ([2, 2], True),
}


def steps_in_time() -> None:
    """Show the three, one below the other: the upper bar of each is the processor, the lower one the link."""
    figure, axes = draw(height=3.3)
    ends = {}
    for row, (way, (buckets, overlap)) in enumerate(WAYS.items()):
        axes.broken_barh([(0, FORWARD)], (row - 0.36, 0.34), color=SKY)
        start, ready = FORWARD, []
        for number, length in enumerate(BACKWARD):
            axes.broken_barh([(start + 0.03, length - 0.06)], (row - 0.36, 0.34), color=BLUE)
            axes.text(start + length / 2, row - 0.19, f"layer {4 - number}", **_inside())
            start += length
            ready.append(start)
        free, layer = (0.0 if overlap else start), 0
        for bucket in buckets:
            layer += bucket
            begins = max(free, ready[layer - 1])
            free = begins + LATENCY + BYTES * bucket
            axes.broken_barh([(begins + 0.03, free - begins - 0.06)], (row + 0.02, 0.34), color=ORANGE)
        ends[way] = free
        axes.text(FORWARD / 2, row - 0.19, "forward", **_inside())
        axes.plot([free, free], [row - 0.36, row + 0.36], color=INK, linewidth=1.2)
    axes.set_yticks(range(len(WAYS)), list(WAYS))
    axes.set(xticks=[], xlim=(0, max(ends.values()) + 0.3), ylim=(len(WAYS) - 0.5, -0.6), xlabel="time")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    show(
        figure,
        "A step on one rank, three ways. Blue: the rank computes. Orange: its messages are under way. The "
        "line marks the end. Drawn, not measured.",
        alt="Three time lines. With a message for each layer after backward the step ends last. With two "
        "buckets after backward it ends earlier. With two buckets that are sent during backward it ends soon "
        "after backward does.",
    )


def _inside() -> dict[str, object]:
    return {"ha": "center", "va": "center", "fontsize": 8, "color": "white"}
