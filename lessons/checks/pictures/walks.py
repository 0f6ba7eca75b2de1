"""Which elements a product touches, and which cache lines it holds, in two orders of the loops (lesson 1)."""

from __future__ import annotations

from collections.abc import Iterator

from checks.animations import animate
from checks.counted import Cache
from checks.figures import BLUE, ORANGE

SIZE, LINE, LINES = 8, 4, 8
"""Of the matrices, of a line in elements, and of the cache in lines."""
CELL = 20  # pixels
Cells = list[tuple[int, int, int]]
"""Matrix (0, 1, 2 for a, b, c), row and column."""


def walks_animation(order: str) -> None:
    """Animate the first multiply-adds in the order "ijp" (sum by sum) or "ipj" (row by row)."""
    cache = Cache(LINES, LINE)
    starts = [cache.place(SIZE * SIZE) for _ in range(3)]
    frames = []
    for count, touched in enumerate(_touches(order), 1):
        for matrix, row, column in touched:
            cache.touch(starts[matrix] + row * SIZE + column)
        held = [
            (matrix, cell // SIZE, cell % SIZE)
            for line in cache.held
            for matrix, start in enumerate(starts)
            for cell in range(line * LINE - start, line * LINE - start + LINE)
            if 0 <= cell < SIZE * SIZE
        ]
        note = f"{count} multiply-add{'s' * (count > 1)}, {cache.fetched} lines fetched"
        frames.append((note, _picture(held, touched)))
        if count == 4 * SIZE:
            break
    inner = {"ijp": "p innermost: down a column of b", "ipj": "j innermost: along a row of b"}[order]
    animate(
        frames,
        f"The order {', '.join(order)} ({inner}). Blue: in the cache of {LINES} lines. Orange: used now.",
        alt=f"Three matrices a, b and c of {SIZE} x {SIZE} with the elements that the order {order} uses, "
        f"step by step. After {4 * SIZE} multiply-adds {cache.fetched} cache lines have been fetched.",
        pause=350,
    )


def _touches(order: str) -> Iterator[Cells]:
    for i in range(SIZE):
        for second in range(SIZE):
            for third in range(SIZE):
                j, p = (second, third) if order == "ijp" else (third, second)
                yield [(0, i, p), (1, p, j), (2, i, j)]


def _picture(held: Cells, touched: Cells) -> str:
    width, height = 3 * (SIZE + 2) * CELL, SIZE * CELL + 26
    parts = []
    for matrix, name in enumerate("abc"):
        middle = _left(matrix) + SIZE * CELL / 2
        parts.append(f'<text x="{middle}" y="14" text-anchor="middle" fill="currentColor">{name}</text>')
    parts.append(f'<path d="{_squares(held)}" fill="{BLUE}" fill-opacity="0.75"/>')
    parts.append(f'<path d="{_squares(touched)}" fill="{ORANGE}"/>')
    lines = "".join(
        f"M{_left(matrix)} {22 + k * CELL}h{SIZE * CELL}M{_left(matrix) + k * CELL} 22v{SIZE * CELL}"
        for matrix in range(3)
        for k in range(SIZE + 1)
    )
    parts.append(f'<path d="{lines}" stroke="currentColor" stroke-opacity="0.35" fill="none"/>')
    return (
        f'<svg viewBox="0 0 {width} {height}" style="width: 100%; max-width: {width}px" font-size="14" '
        f'font-family="system-ui, sans-serif">{"".join(parts)}</svg>'
    )


def _left(matrix: int) -> int:
    return CELL + matrix * (SIZE + 2) * CELL


def _squares(cells: Cells) -> str:
    return "".join(f"M{_left(m) + j * CELL} {22 + i * CELL}h{CELL}v{CELL}h-{CELL}z" for m, i, j in cells)
