"""The reader's machine: its cores, caches and memory, and how fast bytes come from each (lesson 0)."""

from __future__ import annotations

from collections.abc import Sequence

from checks.figures import BLUE, GREEN, INK, MUTED, ORANGE, SKY, WORDS, draw, name, show
from checks.pictures.threads import picture, write
from minidist.kernels.cpu.support.caches import Caches

WIDTH, LEFT, GAP = 640, 10, 12
SHOWN = 4  # cores that are drawn; the others are told


def machine_picture(cores: int, caches: Caches, memory: int | None, unit: str, lanes: int) -> None:
    """Show cores with their lanes and own caches, and below them what all of them share."""
    shown = min(cores, SHOWN)
    width = (WIDTH - 2 * LEFT - GAP * (shown - 1)) / shown
    parts = []
    for core in range(shown):
        x = LEFT + core * (width + GAP)
        parts.append(_core(x, width, str(core), lanes))
        parts.append(_box(x + 8, 84, width - 16, 26, SKY, f"L1: {size(caches.l1_data)}"))
        parts.append(_box(x + 8, 118, width - 16, 32, BLUE, f"L2: {size(caches.l2)}"))
    y = 172
    if caches.l3:
        shared = f"L3: {size(caches.l3)}" + (
            f", {size(caches.l3_total)} in all" if caches.l3_total > caches.l3 else ", shared by cores"
        )
        parts.append(_box(LEFT, y, WIDTH - 2 * LEFT, 42, GREEN, shared))
        y += 54
    parts.append(
        _box(LEFT, y, WIDTH - 2 * LEFT, 56, ORANGE, f"memory: {size(memory)}" if memory else "memory")
    )
    more = f" {SHOWN} of {cores} cores are drawn." if cores > shown else ""
    show(
        picture(WIDTH, y + 62, parts),
        f"Your machine, as its operating system describes it. Each core's {unit} instructions work on "
        f"{lanes} float32 at once.{more}",
        alt=f"{cores} cores, each with {lanes} lanes, an L1 cache of {size(caches.l1_data)} and an L2 cache "
        f"of {size(caches.l2)}; below them {f'an L3 cache of {size(caches.l3)} and ' if caches.l3 else ''}"
        "memory.",
    )


def _core(x: float, width: float, number: str, lanes: int) -> str:
    """A frame with a row of lanes."""
    lane = min(22.0, (width - 20) / lanes)
    start = x + width / 2 - lane * lanes / 2
    row = "".join(
        f'<rect x="{start + lane * each:.1f}" y="36" width="{lane - 2:.1f}" height="18" rx="2" '
        'fill="currentColor" fill-opacity="0.35"/>'
        for each in range(lanes)
    )
    return (
        f'<rect x="{x}" y="6" width="{width:.1f}" height="154" rx="8" fill="none" stroke="currentColor" '
        f'stroke-opacity="0.5"/>{write(x + width / 2, 26, f"core {number}")}{row}'
        f"{write(x + width / 2, 71, f'{lanes} lanes', 11)}"
    )


def _box(x: float, y: float, width: float, height: float, color: str, text: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="5" fill="{WORDS[color]}" '
        f'fill-opacity="0.3" stroke="{WORDS[color]}"/>{write(x + width / 2, y + height / 2 + 5, text)}'
    )


def size(count: int) -> str:
    """32 KiB, 1.5 MiB, 16 GiB."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def stairs_figure(
    sizes: Sequence[int],
    speeds: Sequence[float],
    caches: Caches,
    guess: float | None,
    caption: str,
) -> None:
    """Show GB/s against the size of the arrays, with the ends of the caches.

    Args:
        sizes: bytes of both arrays.
        speeds: GB/s at each.
        caches: of this machine.
        guess: how many times as fast as the memory the smallest cache is, or None.
        caption: as for `show`.
    """
    figure, axes = draw(height=3.6)
    axes.plot(sizes, speeds, "o-", color=BLUE, linewidth=1.2)
    top = 1.25 * max([*speeds, (guess or 0) * speeds[-1]])
    for cache, end in (("L1", caches.l1_data), ("L2", caches.l2), ("L3", caches.l3)):
        if sizes[0] < end < sizes[-1]:
            axes.axvline(end, color=MUTED, linestyle=":", linewidth=1.2)
            name(axes, end, top, f"{cache} ends", MUTED, dx=3, dy=-6)
    if guess is not None:
        axes.plot(sizes[0], guess * speeds[-1], "D", color=INK, fillstyle="none", markersize=9)
        name(axes, sizes[0], guess * speeds[-1], "your guess", INK, dx=9)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, top)
    ticks = [each for each in sizes if each.bit_length() % 3 == 1]
    axes.set_xticks(ticks, [size(each) for each in ticks])
    axes.set(xlabel="both arrays together", ylabel="GB/s")
    show(
        figure,
        caption,
        alt="GB/s against the size of the arrays: high for small arrays, lower after the end of each cache.",
    )
