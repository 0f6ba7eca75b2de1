"""Tiles in registers, a ring of slots, and what each level of memory is asked for (lesson 5)."""

from __future__ import annotations

from collections.abc import Sequence

from checks.figures import BLUE, GREEN, INK, MUTED, ORANGE, WORDS, draw, name, said, show
from checks.pictures.threads import picture, write
from checks.support.animations import Scene, animate
from checks.support.words import number

CELL = 22  # pixels
LEFT, TOP = 120, 58  # of the sums
SLOT_X = (60, 260, 460)  # of the ring
PIECES = 5


def register_tiles() -> None:
    """Animate what a thread reads and multiplies in a step, for tiles of several shapes."""
    frames = []
    for rows, columns in ((1, 1), (2, 2), (4, 4), (8, 1), (8, 8)):
        reads, products = rows + columns, rows * columns
        sums = f"{rows} x {columns} sums" if products > 1 else "One sum"
        adds = f"{products} multiply-add{'s' * (products > 1)}"
        note = f"{sums}: {reads} reads, {adds}, {number(reads / products)} reads for each."
        frames.append((note, _tile(rows, columns)))
    animate(
        frames,
        "One step of the sum in one thread: what it reads of tile_a (blue) and of tile_b (orange), and the "
        "sums to which it adds their products (green).",
        alt="A grid of sums, with numbers of tile_a along its left side and numbers of tile_b along its top. "
        "One sum takes two reads; 2 x 2 sums take 4, 4 x 4 take 8, 8 x 1 take 9, and 8 x 8 take 16.",
        pause=2600,
    )


def _tile(rows: int, columns: int) -> str:
    parts = [
        write(LEFT - CELL - 16, TOP + 4 * CELL, "tile_a", 13, at="end"),
        write(LEFT + 4 * CELL, 18, "tile_b", 13),
    ]

    def cell(x: float, y: float, fill: str, strength: float, text: str = "") -> None:
        parts.append(
            f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" rx="2" fill="{fill}" '
            f'fill-opacity="{strength}"/>'
        )
        if text:
            parts.append(write(x + CELL / 2 - 1, y + CELL / 2 + 4, text, 12, "white"))

    for e in range(8):
        mine = e < rows
        cell(LEFT - CELL - 8, TOP + e * CELL, WORDS[BLUE] if mine else "currentColor", 1 if mine else 0.07)
        mine = e < columns
        cell(LEFT + e * CELL, TOP - CELL - 8, WORDS[ORANGE] if mine else "currentColor", 1 if mine else 0.07)
        for f in range(8):
            inside = e < rows and f < columns
            fill, strength = (WORDS[GREEN], 1) if inside else ("currentColor", 0.07)
            cell(LEFT + f * CELL, TOP + e * CELL, fill, strength, "+" if inside else "")
    x = LEFT + 9 * CELL + 20
    for line, text in enumerate(
        (f"reads: {rows} + {columns}", f"multiply-adds: {rows} x {columns}", _each(rows, columns))
    ):
        parts.append(write(x, TOP + 50 + 30 * line, text, 15, at="start"))
    return picture(600, TOP + 8 * CELL + 8, parts)


def _each(rows: int, columns: int) -> str:
    return f"{number((rows + columns) / (rows * columns))} reads for each multiply-add"


def ring_of_slots() -> None:
    """Animate pieces that are copied into a ring of three slots while others are used."""
    scene = Scene(640, 206)
    scene.label(320, 18, "global memory: pieces of x", 13)
    for p in range(PIECES):
        scene.still(_box(20 + 122 * p, 28, 112, 40))
    scene.label(320, 116, "shared memory: a ring of three slots", 13)
    for slot, x in enumerate(SLOT_X):
        scene.still(_box(x, 128, 124, 48))
        scene.label(x + 62, 194, f"slot {slot}", 12)
    for p in range(PIECES):
        scene.label(76 + 122 * p, 53, f"piece {p}", 12)
        scene.block(f"p{p}", 112, 40, BLUE)
    _play(scene)
    animate(
        scene,
        "The pipelined loop with three slots: while a piece is used, the next two are being copied. The one "
        "barrier of a round says that a piece is there for all, and that all have done with the one before.",
        alt="Five pieces in global memory, and three slots in shared memory. Pieces 0 and 1 are copied to "
        "slots 0 and 1. Then in each round the block waits for the next piece, begins to copy the piece two "
        "further on into the slot that has become free, and uses the piece that is there.",
        pause=2600,
    )


def _box(x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="currentColor" '
        'fill-opacity="0.07" stroke="currentColor" stroke-opacity="0.5"/>'
    )


def _play(scene: Scene) -> None:
    def frame(
        note: str, under_way: Sequence[int], there: Sequence[int] = (), used: int | None = None
    ) -> None:
        """What is in the ring; pieces after it are still at home, and those before it are done with."""
        places: dict[str, tuple[object, ...]] = {}
        first_left = max([*under_way, *there], default=-1) + 1
        for p in range(PIECES):
            slot = (SLOT_X[p % 3] + 6, 132)
            if p in under_way:
                places[f"p{p}"] = (*slot, f"copying {p}", False)
            elif p in there:
                places[f"p{p}"] = (*slot, f"{'using' if p == used else 'piece'} {p}", p == used)
            elif p >= first_left:
                places[f"p{p}"] = (20 + 122 * p, 28, f"piece {p}", False)
        scene.frame(note, places)

    frame("Five pieces, of which no thread has anything yet.", [])
    frame("Before the loop: the threads begin to copy pieces 0 and 1, and do not wait.", [0, 1])
    frame("Wait for piece 0. Barrier: all threads have waited for their part of it.", [1], [0])
    frame("Begin to copy piece 2 into slot 2; use piece 0 meanwhile.", [1, 2], [0], 0)
    frame("Wait for piece 1. Barrier: it is there, and all have done with piece 0.", [2], [1])
    frame("So slot 0 is free: begin to copy piece 3 into it; use piece 1 meanwhile.", [2, 3], [1], 1)
    frame("Wait for piece 2. Barrier: it is there, and all have done with piece 1.", [3], [2])
    frame("So slot 1 is free: begin to copy piece 4 into it; use piece 2 meanwhile.", [3, 4], [2], 2)
    frame("Wait for piece 3, barrier. There is nothing left to copy; use piece 3.", [4], [3], 3)
    frame("Wait for piece 4, barrier; use piece 4. Done.", [], [4], 4)


def levels(
    owns: Sequence[int],
    flop_per_byte: Sequence[float],
    flop_model: Sequence[float],
    passes: Sequence[float],
    passes_model: Sequence[float],
    guess: float | None,
) -> None:
    """Show what global memory and what shared memory are asked for, against the side of a thread's tile."""
    figure, (left, right) = draw(height=3.4, columns=2)
    left.plot(owns, flop_model, "--", color=BLUE, linewidth=1.2)
    left.plot(owns, flop_per_byte, "o", color=BLUE)
    left.axhline(20, color=MUTED, linestyle=":", linewidth=1.2)
    name(left, owns[0], 20, "20: enough", MUTED, dx=0, dy=8)
    left.set_title("global memory", fontsize=10)
    left.set(ylabel="FLOP for each byte")
    right.plot(owns, passes_model, "--", color=GREEN, linewidth=1.2)
    right.plot(owns, passes, "o", color=GREEN)
    right.axhline(0.25, color=MUTED, linestyle=":", linewidth=1.2)
    name(right, owns[0], 0.25, "1/4: enough", MUTED, dx=0, dy=-9)
    right.set_title("shared memory", fontsize=10)
    right.set(ylabel="passes for each multiply-add")
    if guess is not None:
        right.plot(owns[-1], guess, "D", color=INK, fillstyle="none", markersize=9)
        name(right, owns[-1], guess, "your guess", INK, dx=-70, dy=0)
    right.set_ylim(0.16 if guess is None else min(0.16, guess / 1.5), max(2.6, 1.5 * (guess or 0)))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(owns, [f"{own} x {own}" for own in owns])
        axes.minorticks_off()
        axes.set_xlabel("sums of a thread")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}")
    show(
        figure,
        f"With 8 x 8 sums a thread does {flop_per_byte[-1]:.3g} FLOP for each byte of global memory, and its "
        f"warp takes {passes[-1]:.3g} passes for each multiply-add; {said(guess)}. Dashed: formulas.",
        alt="Two plots against the side of a thread's tile, 1 to 8. FLOP for each byte of global memory rise "
        "in proportion, from 4 to 32, and pass the line at 20 between 4 and 8. Passes through shared memory "
        "for each multiply-add fall from 2 to a little above a quarter, where a dotted line is.",
    )
