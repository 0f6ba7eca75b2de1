"""Attention's heads, and a vocabulary, that ranks share (lesson 13)."""

from __future__ import annotations

import math

from checks.figures import BLUE, GREEN, ORANGE, WORDS, show
from checks.pictures.threads import picture, write

LOGITS = ((2, 5, 1, 4), (3, 9, 0, 2), (6, 1, 7, 3))  # of one row, on three ranks
TARGET = (2, 1)  # the rank that has it, and the column there


def shared_heads() -> None:
    """Attention with four heads on two ranks, from x to y."""
    marks, column, high = [], 15, 60
    for rank, own in enumerate((BLUE, ORANGE)):
        middle = 84 + 112 * rank
        marks.append(write(28, middle + 4, f"rank {rank}", 12.5))
        marks.append(_box(64, middle - 20, 4 * column, 40, "currentColor", 0.3))
        for x, sign in ((139, "@"), (398, "→"), (520, "@"), (610, "=")):
            marks.append(write(x, middle + 5, sign, 15))
        for which in range(3):
            x = 158 + which * (4 * column + 14)
            marks.append(_box(x + 2 * column * rank, middle - high / 2, 2 * column, high, WORDS[own]))
            marks.append(_frame(x, middle - high / 2, 4 * column, high))
            for cut in (1, 2, 3):
                strength = 0.9 if cut == 2 else 0.35
                line = f"M {x + cut * column} {middle - high / 2} v {high}"
                marks.append(f'<path d="{line}" stroke="currentColor" opacity="{strength}"/>')
        for head in range(2):
            y = middle - 24 + 26 * head
            marks.append(_box(412, y, 92, 21, WORDS[own]))
            marks.append(write(458, y + 15, f"head {2 * rank + head}", 12, "white"))
        marks.append(_box(536, middle - 30 + 30 * rank, 4 * column, 30, WORDS[own]))
        marks.append(_frame(536, middle - 30, 4 * column, 60))
        marks.append(_box(624, middle - 20, 4 * column, 40, WORDS[own], 0.45))
    titles = ((94, "x"), (188, "query"), (262, "key"), (336, "value"), (458, "attention"), (566, "output"))
    marks += [write(x, 40, title, 12.5) for x, title in (*titles, (654, "a summand"))]
    marks.append(f'<path d="M 654 106 V 174" stroke="{WORDS[GREEN]}" stroke-width="5" fill="none"/>')
    marks.append(write(654, 240, "all-reduce makes y", 12.5))
    marks.append(write(64, 240, "enter: all-reduce of x's gradient, backward", 12.5, at="start"))
    show(
        picture(720, 252, marks),
        "Attention with four heads on two ranks. Each has the columns of two whole heads, and the rows of "
        "the output matrix that these heads meet. Forward, only the summands are sent.",
        alt="Two ranks. Each multiplies the whole x with its half of the columns of query, key and value: "
        "two of four heads. It computes attention for its two heads, multiplies by its half of the rows of "
        "the output matrix, and gets a summand as large as y. An all-reduce makes y of both.",
    )


def shared_vocabulary() -> None:
    """A row of logits on three ranks, and the three numbers that they exchange for it."""
    marks, cell, right = [], 26, 512
    largest = max(map(max, LOGITS))
    sums = [sum(math.exp(z - largest) for z in own) for own in LOGITS]
    score = LOGITS[TARGET[0]][TARGET[1]] - largest
    for rank, (own, fill) in enumerate(zip(LOGITS, (BLUE, ORANGE, GREEN), strict=True)):
        left = 150 + rank * (4 * cell + 18)
        marks.append(write(left + 2 * cell, 18, f"rank {rank}, {4 * rank} to {4 * rank + 3}", 12.5))
        for place, value in enumerate(own):
            x = left + place * cell
            marks.append(_box(x, 28, cell - 2, cell - 2, WORDS[fill]))
            marks.append(write(x + cell / 2 - 1, 47, str(value), 13, "white"))
            if (rank, place) == TARGET:
                marks.append(_frame(x - 3, 25, cell + 4, cell + 4, 2.5))
                marks.append(write(x + cell / 2, 74, "target", 11))
        lines = str(max(own)), f"{sums[rank]:.3f}", str(score) if rank == TARGET[0] else "0"
        marks += [write(left + 2 * cell, 106 + 30 * line, text, 13) for line, text in enumerate(lines)]
    titles = "logits z of this row", "largest", f"sum of exp(z - {largest})", f"target's z - {largest}"
    for y, title in zip((45, 106, 136, 166), titles, strict=True):
        marks.append(write(136, y, title, 12.5, at="end"))
    marks.append(write(right + 34, 47, "all-reduce", 12.5, at="start"))
    for line, text in enumerate((f"max: {largest}", f"sum: {sum(sums):.3f}", f"sum: {score}")):
        marks.append(write(right + 14, 106 + 30 * line, "→", 14))
        marks.append(write(right + 34, 106 + 30 * line, text, 13, at="start"))
    loss = math.log(sum(sums)) - score
    text = f"loss of this row = log {sum(sums):.3f} - ({score}) = {loss:.3f}"
    marks.append(write(150, 200, text, 13, at="start"))
    show(
        picture(640, 212, marks),
        "One row of logits z on three ranks, with a vocabulary of 12. For it the ranks exchange three "
        "numbers: the largest first, then both sums in one message. No logit is sent.",
        alt="Twelve logits, four on each of three ranks. The ranks find the largest of all, 9. Each adds up "
        "its exponentials of z - 9. Rank 2, which has the target, gives the target's z - 9; the others give "
        "0. Sums over the ranks make the loss.",
    )


def _box(x: float, y: float, width: float, height: float, fill: str, strength: float = 1) -> str:
    place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<rect {place} fill="{fill}" fill-opacity="{strength}"/>'


def _frame(x: float, y: float, width: float, height: float, line: float = 1) -> str:
    place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<rect {place} fill="none" stroke="currentColor" stroke-width="{line}"/>'
