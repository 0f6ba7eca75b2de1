"""What a product touches in several orders of its loops, and what cache and registers hold (lesson 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from checks.figures import BLUE, GREEN, ORANGE, WORDS
from checks.pictures.threads import picture, write
from checks.support.animations import animate
from checks.support.counted import Cache

SIZE, LINE, LINES = 8, 4, 8
"""Of the matrices, of a line in elements, and of the cache in lines."""
BLOCK, BLOCK_LINES = 2, 12  # rows of b in a block, and lines of the cache in that picture
CELL, WIDE = 20, 30  # pixels
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
        note = f"{count} multiply-add{'s' * (count > 1)}, {cache.fetched} lines fetched"
        frames.append((note, _picture(_held(cache, starts), touched)))
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


def _held(cache: Cache, starts: Sequence[int]) -> Cells:
    """The elements in the cache; matrices begin at `starts`."""
    return [
        (matrix, cell // SIZE, cell % SIZE)
        for line in cache.held
        for matrix, start in enumerate(starts)
        for cell in range(line * LINE - start, line * LINE - start + LINE)
        if 0 <= cell < SIZE * SIZE
    ]


def blocks_animation() -> None:
    """Animate a product in blocks of two rows of b: in a frame, a row of a and c meets a block."""
    runs = []
    for size in (BLOCK, SIZE):  # in blocks, and with all of b as one
        cache = Cache(BLOCK_LINES, LINE)
        starts = [cache.place(SIZE * SIZE) for _ in range(3)]
        run = []
        for p0 in range(0, SIZE, size):
            for i in range(SIZE):
                for p in range(p0, p0 + size):
                    for j in range(SIZE):
                        for matrix, row, column in ((0, i, p), (1, p, j), (2, i, j)):
                            cache.touch(starts[matrix] + row * SIZE + column)
                    if p % BLOCK == BLOCK - 1:
                        run.append((p0, i, cache.fetched, _held(cache, starts)))
        runs.append(run)
    frames = []
    for (p0, i, fetched, held), (_, _, without, _) in zip(*runs, strict=True):
        block = range(p0, p0 + BLOCK)
        touched = [(0, i, p) for p in block] + [
            (*at, j) for j in range(SIZE) for at in ((1, p0), (1, p0 + 1), (2, i))
        ]
        note = (
            f"Rows {p0} and {p0 + 1} of b, row {i} of a and c: {fetched} lines fetched so far, and {without} "
            "without blocks."
        )
        frames.append((note, _picture(held, touched)))
    _, _, in_all, _ = runs[0][-1]
    animate(
        frames,
        f"Blocks of {BLOCK} rows of b. Blue: in the cache, which has {BLOCK_LINES} lines here. Orange: used "
        "now. The block stays in the cache for all rows of a.",
        alt=f"Three matrices a, b and c of {SIZE} x {SIZE}. Two rows of b stay in the cache while all rows "
        f"of a and c go by, then come the next two. All of it fetches {in_all} lines; without blocks it is "
        f"{runs[1][-1][2]}.",
        pause=700,
    )


def register_walk() -> None:
    """Animate 2 x 4 elements of a in registers, on a walk along the rows of b and c."""
    rows, deep = 2, 4
    left, top = (deep + 1) * WIDE + 40, 28
    down = top + deep * WIDE + 24  # where a and c begin

    def cell(x: float, y: float, fill: str, strength: float, text: str = "") -> str:
        drawn = f'<rect x="{x}" y="{y}" width="{WIDE - 2}" height="{WIDE - 2}" rx="2" fill="{fill}" '
        return f'{drawn}fill-opacity="{strength}"/>' + (
            write(x + WIDE / 2 - 1, y + WIDE / 2 + 4, text, 11, "white") if text else ""
        )

    frames = []
    for now in range(SIZE):
        parts = [
            write(left + SIZE * WIDE / 2, 18, "4 rows of b", 13),
            write(30 + deep * WIDE / 2, down - 8, "2 x 4 of a, in registers", 13),
            write(left + SIZE * WIDE / 2, down + rows * WIDE + 18, "2 rows of c", 13),
        ]
        for q in range(deep):
            for i in range(rows):
                parts.append(cell(30 + q * WIDE, down + i * WIDE, WORDS[BLUE], 1, f"a{i}{q}"))
            for j in range(SIZE):
                mine = j == now
                fill, strength = (WORDS[ORANGE], 1) if mine else ("currentColor", 0.07)
                parts.append(cell(left + j * WIDE, top + q * WIDE, fill, strength, f"b{q}" if mine else ""))
        for i in range(rows):
            for j in range(SIZE):
                strength = 1 if j == now else 0.35 if j < now else 0.07
                fill = WORDS[GREEN] if j <= now else "currentColor"
                parts.append(
                    cell(left + j * WIDE, down + i * WIDE, fill, strength, "+ 4" if j == now else "")
                )
        note = f"j = {now}: read 4 elements of b and 2 of c, do 8 multiply-adds, write 2 elements of c."
        frames.append((note, picture(left + SIZE * WIDE + 10, down + rows * WIDE + 28, parts)))
    animate(
        frames,
        "A walk along j with 2 x 4 elements of a in registers. Each element of b (orange) is used for both "
        "rows, and each element of c (green) gets four products at a time.",
        alt="Eight elements of a stay where they are, in two rows of four. In each step a column of four "
        "elements of b comes, and four products are added to each of the two elements of c below it.",
        pause=900,
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
