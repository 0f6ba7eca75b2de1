"""Tiles that go to shared memory, the banks that they lie in, and what tiles save (lesson 4)."""

from __future__ import annotations

from collections.abc import Sequence

from checks.figures import BLUE, GREEN, INK, MUTED, ORANGE, WORDS, draw, name, said, show
from checks.pictures.threads import picture, write
from checks.support.animations import Scene, animate

TILE = 40  # pixels of a tile
PITCH = TILE + 3
A, B, C = (16, 196), (190, 30), (190, 196)  # where the matrices lie
ROW, COLUMN = 1, 2  # of the tile of c that the block computes
SLOTS = ((440, 218), (536, 218))  # in shared memory, for a tile of a and one of b


def tiles_animation() -> None:
    """Animate a block that computes a tile of c from three tiles of a and three of b."""
    scene = Scene(640, 350)
    for (x, y), title, tx, ty in ((A, "a", 62, 188), (B, "b", 254, 22), (C, "c", 340, 262)):
        scene.label(tx, ty, title, 15)
        for row in range(3):
            for column in range(3):
                scene.still(
                    f'<rect x="{x + column * PITCH}" y="{y + row * PITCH}" width="{TILE}" height="{TILE}" '
                    'rx="3" fill="currentColor" fill-opacity="0.07" stroke="currentColor" opacity="0.6"/>'
                )
    scene.still(
        '<rect x="392" y="166" width="232" height="116" rx="8" fill="none" stroke="currentColor" '
        'stroke-opacity="0.6" stroke-dasharray="5 4"/>'
    )
    scene.label(508, 188, "shared memory of this block", 12)
    for p in range(3):
        scene.block(f"a{p}", TILE, TILE, BLUE)
        scene.block(f"b{p}", TILE, TILE, ORANGE)
    scene.block("c", TILE, TILE, GREEN)
    _play(scene)
    animate(
        scene,
        "A block of threads computes one tile of c. Every number that it fetches is used by a whole row or "
        "column of threads.",
        alt="Matrices a, b and c, each of three by three tiles. To compute one tile of c, a block copies the "
        "first tile of a row of a and the first tile of a column of b to its shared memory, adds up, then "
        "does the same with the second and third tiles, and writes its tile of c.",
        pause=2400,
    )


def _play(scene: Scene) -> None:
    at_a = {p: (A[0] + p * PITCH, A[1] + ROW * PITCH) for p in range(3)}
    at_b = {p: (B[0] + COLUMN * PITCH, B[1] + p * PITCH) for p in range(3)}
    at_c = (C[0] + COLUMN * PITCH, C[1] + ROW * PITCH)

    def frame(note: str, there: int | None, done: int, outline: bool = False) -> None:
        places: dict[str, tuple[object, ...]] = {}
        for p in range(3):
            here = p == there
            places[f"a{p}"] = (*(SLOTS[0] if here else at_a[p]), f"a{p}", here)
            places[f"b{p}"] = (*(SLOTS[1] if here else at_b[p]), f"b{p}", here)
        places["c"] = (*at_c, f"{done}/3", outline)
        scene.frame(note, places)

    frame("A tile of c (green) needs a row of tiles of a and a column of tiles of b.", None, 0)
    for p in range(3):
        which = ("first", "second", "third")[p]
        frame(f"All threads fetch the {which} pair of tiles, an element of each per thread. Barrier.", p, p)
        frame("Each thread adds up its row of one times its column of the other. Barrier.", p, p + 1, True)
    frame("The sums are complete: each thread writes its element of c.", None, 3, True)


def banks_picture() -> None:
    """Show in which banks a column of a tile lies, without padding and with it; 8 banks stand for 32."""
    cell, parts = 30, []
    for left, width, title in ((24, 8, "rows of 8 words"), (330, 9, "rows of 9 words")):
        parts.append(write(left + 4 * cell, 16, title, 14))
        for bank in range(8):
            parts.append(write(left + (bank + 0.5) * cell, 36, str(bank), 11))
        for word in range(width * 8):
            row, column = divmod(word, width)
            x, y = left + word % 8 * cell, 42 + word // 8 * 24
            mine, padding = column == 3, column == 8
            color = WORDS[BLUE] if mine else "currentColor"
            parts.append(
                f'<rect x="{x}" y="{y}" width="{cell - 2}" height="22" rx="2" fill="{color}" '
                f'fill-opacity="{1 if mine else 0.3 if padding else 0.07}"/>'
            )
            text, ink = ("", "") if padding else (f"{row},{column}", "white" if mine else "currentColor")
            parts.append(write(x + cell / 2 - 1, y + 15, text, 9.5, ink or "currentColor"))
    parts.append(write(290, 36, "bank", 11))
    show(
        picture(590, 264, parts),
        "A tile of 8 x 8 words in 8 banks, which stand for 32 x 32 in 32. Column 3 is blue: without padding "
        "all of it is in bank 3; with one unused word (grey) at the end of each row it is spread over all.",
        alt="Two drawings of the same tile. On the left the rows are 8 words long, and all words of column "
        "3 lie one below the other in bank 3. On the right rows are 9 words long, and each word of column 3 "
        "lies in another bank.",
    )


def intensity(
    sides: Sequence[int],
    asked: Sequence[float],
    moved: Sequence[float],
    model: Sequence[float],
    guess: float | None,
) -> None:
    """Show FLOP for each byte against the tiles' side: predicted, asked for, and moved in sectors."""
    figure, axes = draw(height=3.6)
    axes.plot(sides, model, "--", color=BLUE, linewidth=1.2)
    axes.plot(sides, asked, "o", color=BLUE)
    axes.plot(sides, moved, "s", color=ORANGE, fillstyle="none", markersize=8)
    name(axes, sides[2], asked[2], "asked for by threads, as reads() says", BLUE, dx=10, dy=-8)
    name(axes, sides[1], moved[1], "moved in sectors", ORANGE, dx=10)
    axes.axhline(20, color=MUTED, linestyle=":", linewidth=1.2)
    name(axes, sides[0], 20, "20, for the arithmetic of an H100 to be busy", MUTED, dx=0, dy=7)
    if guess is not None:
        axes.plot(32, guess, "D", color=INK, fillstyle="none", markersize=9)
        name(axes, 32, guess, "your guess", INK, dx=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="side of a tile (1: the naive kernel)", ylabel="FLOP for each byte read")
    axes.set_xticks(sides, [str(side) for side in sides])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    show(
        figure,
        f"Tiles of 32 x 32 do {asked[-1]:.3g} FLOP for each byte that threads ask for, the naive kernel "
        f"{asked[0]:.3g}; {said(guess)}.",
        alt="FLOP for each byte against the side of the tiles, both in powers of two: a straight line from a "
        "quarter at side 1 to 8 at side 32, on which the counts lie, below a dotted line at 20. What counts "
        "bytes that move lies a little above the line at side 1, below it at 4, and on it from 8 on.",
    )
