"""Workers that wait for each other or not: a simulation, a chart and an animation (lesson 11)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from checks.figures import BLUE, COLORS, GREEN, INK, MUTED, ORANGE, RED, draw, name, show
from checks.support.animations import Scene, animate

MayBegin = Callable[[list[int], int], bool]
"""From the steps that each worker has finished, and a worker: whether it may begin its next."""


class Step(NamedTuple):
    """A step of one worker."""

    begin: float  # when it pulled
    end: float  # when it pushed
    pulled: int  # updates that its parameters held
    stale: int  # updates by others in between


def race(seconds: Sequence[Callable[[], float]], may_begin: MayBegin, until: float) -> list[list[Step]]:
    """What workers of a parameter server do, in thought: for each its steps.

    Args:
        seconds: of each worker, what gives how long its next step takes.
        may_begin: the rule by which workers wait.
        until: when it ends.
    """
    ranks = range(len(seconds))
    clocks, made = [0 for _ in ranks], 0
    steps: list[list[Step]] = [[] for _ in ranks]
    begun: dict[int, tuple[float, int]] = {}
    ends: list[tuple[float, int]] = []
    now, idle = 0.0, set(ranks)
    while True:
        for worker in sorted(idle):
            if may_begin(clocks, worker):
                idle.remove(worker)
                begun[worker] = now, made
                heapq.heappush(ends, (now + seconds[worker](), worker))
        now, worker = heapq.heappop(ends)
        if now > until + 1e-9:
            return steps
        begin, pulled = begun[worker]
        steps[worker].append(Step(begin, now, pulled, made - pulled))
        clocks[worker] += 1
        made += 1
        idle.add(worker)


def gradients_a_second(steps: Sequence[Sequence[Step]], until: float) -> float:
    """Of all workers of a race."""
    return sum(map(len, steps)) / until


def workers_chart(
    races: Mapping[str, Sequence[Sequence[Step]]], until: float, caption: str, alt: str
) -> None:
    """Show races one above the other: a row a worker, a box a step; the last worker is the straggler.

    In the boxes of a race whose name begins with "not" is how stale each step's gradient is.
    """
    from matplotlib.patches import Rectangle

    workers = max(map(len, races.values()))
    figure, axes = draw(height=0.6 + len(races) * (0.3 + 0.27 * workers))
    base, ticks = 0.0, {}
    for key, steps in races.items():
        axes.text(0, base - 0.62, key, fontsize=9.5, fontweight="bold", color=INK)
        for worker, own in enumerate(steps):
            row, color = base + worker, RED if worker == workers - 1 else BLUE
            ticks[row] = f"worker {worker + 1}"
            axes.hlines(row, 0, until, color=MUTED, linewidth=0.6, zorder=1)
            for begin, end, _, stale in own:
                box = Rectangle((begin, row - 0.4), end - begin, 0.8, facecolor=color, zorder=2, linewidth=0)
                axes.add_patch(box)
                axes.vlines(end, row - 0.4, row + 0.4, color="white", linewidth=1.2, zorder=3)
                if key.startswith("not"):
                    place = (begin + end) / 2, row
                    axes.text(*place, stale, ha="center", va="center", fontsize=8, color="white", zorder=4)
        base += workers + 1.1
    axes.set(xlim=(0, until), ylim=(base - 1.4, -0.95), yticks=list(ticks), xlabel="time, seconds")
    axes.set_yticklabels(ticks.values())
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    show(figure, caption, alt)


def slack_chart(
    slack: Sequence[int], panels: Mapping[str, Mapping[str, Sequence[float]]], caption: str
) -> None:
    """Show gradients a second against how far apart workers may be, a panel a situation.

    Args:
        slack: steps.
        panels: by situation, by rule; a rule with one value is a level, drawn dashed.
        caption: as for `show`.
    """
    figure, all_axes = draw(height=3.1, columns=len(panels), sharey=True)
    for axes, (situation, lines) in zip(all_axes, panels.items(), strict=True):
        axes.set_title(situation, fontsize=10)
        for (key, values), color in zip(lines.items(), COLORS, strict=False):
            if len(values) == 1:
                axes.axhline(values[0], color=color, linestyle="--", linewidth=1.2)
                name(axes, slack[0], values[0], key, color, dx=2, dy=7)
            else:
                axes.plot(slack, values, "o-", color=color, markersize=4)
                others = [other[-3] for other in lines.values() if len(other) > 1 and other is not values]
                above = any(0 <= values[-3] - other < 0.5 for other in others)
                name(axes, slack[-3], values[-3], key, color, dx=2, dy=10 if above else -12)
        axes.set(xlabel="steps apart")
    most = max(value for lines in panels.values() for values in lines.values() for value in values)
    all_axes[0].set(ylabel="gradients a second", ylim=(0, 1.12 * most))
    show(
        figure,
        caption,
        alt="With hiccups that hit any worker both curves climb towards the level of not waiting, as the "
        "slack grows. With one worker that is always slow both stay flat, far below that level.",
    )


def server_animation(steps: Sequence[Sequence[Step]], events: int = 9) -> None:
    """Show a race's first pushes: versions of the parameters, and how late each gradient comes."""
    workers = range(len(steps))
    scene = Scene(640, 232)
    across = {worker: 90 + 460 * worker / (len(steps) - 1) for worker in workers}
    scene.label(320, 20, "server")
    scene.still('<rect x="252" y="28" width="136" height="40" rx="5" fill="none" stroke="currentColor"/>')
    scene.block("server", 128, 32, GREEN)
    for worker in workers:
        x = across[worker]
        scene.label(x, 224, f"worker {worker + 1}" + (" (slow)" if worker == len(steps) - 1 else ""))
        scene.still(
            f'<rect x="{x - 68}" y="164" width="136" height="40" rx="5" fill="none" stroke="currentColor"/>'
        )
        scene.block(f"has {worker}", 128, 32, RED if worker == len(steps) - 1 else BLUE)
        scene.block(f"push {worker}", 128, 32, ORANGE)
    holds, version = dict.fromkeys(workers, 0), 0

    def frame(note: str, pushes: int | None = None, arrived: bool = False) -> None:
        places: dict[str, tuple[object, ...]] = {"server": (256, 32, f"version {version}")}
        for worker in workers:
            places[f"has {worker}"] = (across[worker] - 64, 168, f"version {holds[worker]}")
        if pushes is not None:
            x, y = (256, 78) if arrived else (across[pushes] - 64, 128)
            places[f"push {pushes}"] = (x, y, f"gradient of {holds[pushes]}", True)
        scene.frame(note, places)

    frame("All workers have pulled version 0, and compute.")
    order = sorted((step.end, worker, step.stale) for worker in workers for step in steps[worker])
    for _, worker, stale in order[:events]:
        frame(f"Worker {worker + 1} pushes a gradient of version {holds[worker]}.", worker)
        what = "the gradient is fresh" if not stale else f"the gradient's staleness is {stale}"
        frame(f"The server is at version {version}, so {what}. The server uses it.", worker, arrived=True)
        version += 1
        holds[worker] = version
        frame(f"That makes version {version}, and worker {worker + 1} pulls it. No worker has waited.")
    animate(
        scene,
        "An asynchronous parameter server. The slow worker's gradients belong to old versions.",
        alt="A server and three workers. Each worker pushes a gradient when it has one, the server's version "
        "goes up by one, and that worker pulls it. The slow worker's gradient is several versions old.",
        pause=1500,
    )
