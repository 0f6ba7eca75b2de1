"""Threads and what they read: blocks over an array, and the sectors of a warp's load (lesson 3)."""

from __future__ import annotations

from collections.abc import Sequence

from checks.figures import BLUE, INK, RED, WORDS, draw, name, said, show
from checks.support.animations import animate

CELL = 36  # pixels
SMALL = 19
SECTOR = 8  # elements of 4 bytes
THREADS = 8  # of a warp, which has 32


def blocks_over_an_array() -> None:
    """Show three blocks of four threads over an array of ten elements."""
    parts, left, gap = [], 84, 18
    for thread in range(12):
        block, own = divmod(thread, 4)
        x = left + thread * (CELL + 4) + block * gap
        beyond = thread >= 10
        color = WORDS[RED if beyond else BLUE]
        if own == 0:
            middle = x + 2 * (CELL + 4) - 2
            parts.append(
                f'<rect x="{x - 7}" y="30" width="{4 * (CELL + 4) + 10}" height="62" rx="6" fill="none" '
                f'stroke="currentColor" opacity="0.5"/>{write(middle, 22, f"blockIdx.x = {block}")}'
            )
        parts.append(f'<rect x="{x}" y="52" width="{CELL}" height="32" rx="4" fill="{color}"/>')
        parts.append(
            write(x + CELL / 2, 45, str(own), 11) + write(x + CELL / 2, 73, str(thread), 13, "white")
        )
        x2 = left + thread * (CELL + 4) + block * gap
        dash = ' stroke-dasharray="3 3"' if beyond else ""
        parts.append(f'<path d="M{x + CELL / 2} 96 V122" stroke="{color}" stroke-width="1.5"{dash}/>')
        if not beyond:
            parts.append(
                f'<rect x="{x2}" y="124" width="{CELL}" height="28" fill="currentColor" fill-opacity="0.1" '
                f'stroke="currentColor" stroke-opacity="0.5"/>{write(x2 + CELL / 2, 142, f"x[{thread}]", 11)}'
            )
        else:
            parts.append(write(x2 + CELL / 2, 142, "?", 14, color))
    parts.append(write(left - 14, 45, "threadIdx.x", 11, at="end"))
    parts.append(write(left - 14, 73, "grid(1)", 12, at="end"))
    parts.append(write(left - 14, 142, "memory", 12, at="end"))
    width = left + 12 * (CELL + 4) + 2 * gap + 10
    show(
        picture(width, 162, parts),
        "Three blocks of four threads over ten elements. cuda.grid(1) numbers the threads of all blocks: "
        "threads 10 and 11 have no element.",
        alt="Twelve threads in three blocks, numbered 0 to 3 within each block and 0 to 11 in all. Threads 0 "
        "to 9 stand above elements 0 to 9 of an array; threads 10 and 11, in red, stand above nothing.",
    )


def sectors_of_a_load() -> None:
    """Animate which sectors the load of some threads touches, for several strides."""
    frames = []
    for stride in (1, 2, 4, 8, 0):
        used = {thread * stride for thread in range(THREADS)}
        touched = {element // SECTOR for element in used}
        useful = min(1.0, 4 * THREADS / (32 * len(touched)))
        told = f"{100 * useful:g}% of the bytes that come are used" if stride else "all threads get the same"
        reads = f"{stride} t" if stride > 1 else "t" if stride else "0"
        plural = "s" * (len(touched) > 1)
        note = f"Thread t reads element {reads}: {len(touched)} sector{plural}; {told}."
        frames.append((note, _memory(used, touched, stride)))
    animate(
        frames,
        "Eight of a warp's 32 threads, and a memory of eight sectors. Blue is what they read, grey what "
        "comes with it.",
        alt="A row of threads above a memory of 64 elements in eight sectors. With neighbouring elements the "
        "threads touch one sector, with every second element two, then four, and with every eighth element "
        "eight sectors, of which one element each is used.",
        pause=2600,
    )


def strides_figure(
    strides: Sequence[int], counted: Sequence[float], predicted: Sequence[float], guess: float | None
) -> None:
    """Show sectors for a load against the stride; `guess` is how many times a row's bytes a column's are."""
    figure, axes = draw(height=3.2)
    axes.plot(strides, predicted, "--", color=BLUE, linewidth=1.2)
    axes.plot(strides, counted, "o", color=BLUE)
    name(axes, strides[0], counted[0], "a row of the matrix", dx=10, dy=-9)
    name(axes, strides[-1], counted[-1], "a column of the matrix", dx=-105, dy=-14)
    if guess is not None:
        axes.plot(strides[-1], 4 * guess, "D", color=INK, fillstyle="none", markersize=9)
        name(axes, strides[-1], 4 * guess, "your guess", dx=9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(strides, [str(stride) for stride in strides])
    axes.minorticks_off()
    axes.set(xlabel="elements from one thread's to the next one's", ylabel="sectors for a load of a warp")
    axes.set_ylim(bottom=0)
    axes.set_yticks([0, 4, 8, 16, 24, 32])
    show(
        figure,
        "Dots are counted by the emulator, the dashed line is your sectors(). A column takes "
        f"{counted[-1] / counted[0]:g} times the bytes of a row; {said(guess)}.",
        alt="Sectors for a load against the stride: 4 at stride 1, rising in proportion to 32 at stride 8, "
        "and flat from there on.",
    )


def _memory(used: set[int], touched: set[int], stride: int) -> str:
    """Two rows of four sectors; below them what thread 0, 1, ... reads."""
    parts, left, pitch = [], 14, SECTOR * SMALL + 10
    for sector in range(THREADS):
        x0, y0 = left + sector % 4 * pitch, 26 + sector // 4 * 64
        parts.append(write(x0 + SECTOR * SMALL / 2, y0 - 7, f"sector {sector}", 11))
        for place in range(SECTOR):
            element = sector * SECTOR + place
            fill, strength = ("currentColor", 0.3 if sector in touched else 0.05)
            if element in used:
                fill, strength = WORDS[BLUE], 1
            x = x0 + place * SMALL
            parts.append(
                f'<rect x="{x}" y="{y0}" width="{SMALL - 1}" height="28" fill="{fill}" '
                f'fill-opacity="{strength}" stroke="currentColor" stroke-opacity="0.25"/>'
            )
            if element in used:
                owner = f"t{element // stride}" if stride else "all"
                parts.append(write(x + SMALL / 2 - 0.5, y0 + 18, owner, 10, "white"))
    return picture(left * 2 + 4 * pitch - 10, 126, parts)


def write(
    x: float, y: float, text: str, size: float = 13, fill: str = "currentColor", at: str = "middle"
) -> str:
    """A text in an SVG."""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{at}" fill="{fill}">{text}</text>'


def picture(width: float, height: float, parts: list[str]) -> str:
    """An SVG of these parts that fits the page."""
    return (
        f'<svg viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        f'style="width: 100%; max-width: {width}px">{"".join(parts)}</svg>'
    )
