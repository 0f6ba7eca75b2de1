"""A softmax that is put together block by block, and the blocks of a square that a mask hides (lesson 17)."""

from __future__ import annotations

import math

from checks.figures import BLUE, GREEN, MUTED, ORANGE, WORDS, show
from checks.pictures.threads import picture, write
from checks.support.animations import animate

SCORES = (1.0, 2.0, 0.0, 1.0, 4.0, 3.0, 2.0, 4.0)  # of one query, in blocks of two keys
CELL = 52  # pixels
SIDE = 30


def one_row() -> None:
    """Animate how the largest score, the total and the sums of one query follow the blocks of keys."""
    frames = [
        ("One query and eight keys, in blocks of two. Nothing has been seen.", _row(-1, -math.inf, 0.0, ""))
    ]
    largest, total = -math.inf, 0.0
    for block in range(4):
        scores = SCORES[2 * block : 2 * block + 2]
        higher = max(largest, *scores)
        fade = math.exp(largest - higher)
        total = fade * total + sum(math.exp(score - higher) for score in scores)
        if block == 0:
            note = f"Block 0: the largest is {higher:g}, and the total {total:.3f}."
        elif fade < 1:
            note = f"Block {block} has a larger score: total and sums times exp({largest:g} - {higher:g})."
        else:
            note = f"Block {block}: the largest stays {higher:g}, and the block is added."
        frames.append((note, _row(block, higher, total, f"x {fade:.3f}" if 0 < fade < 1 else "")))
        largest = higher
    frames.append(
        (
            "The end: sums / total is the result. No block had to wait for the others.",
            _row(4, largest, total, ""),
        )
    )
    animate(
        frames,
        "The scores of one query (numbers in the boxes), seen in blocks of two, and what is kept between the "
        "blocks: the largest score, the total of exp(score - largest), and the sums of the values with these "
        "weights.",
        alt="Eight scores in four blocks: 1 2, 0 1, 4 3, 2 4. The largest is 2 after two blocks, and 4 after "
        "the third, where total and sums are multiplied by exp(2 - 4), which is 0.135.",
        pause=2600,
    )


def _row(now: int, largest: float, total: float, fade: str) -> str:
    parts = [write(92, 44, "scores", 13, at="end"), write(92, 122, "kept", 13, at="end")]
    for place, score in enumerate(SCORES):
        block = place // 2
        color = WORDS[ORANGE] if block == now else WORDS[GREEN] if block < now else "currentColor"
        x = 104 + place * (CELL + 2) + 10 * block
        parts.append(
            f'<rect x="{x}" y="20" width="{CELL}" height="38" rx="3" fill="{color}" '
            f'fill-opacity="{1 if block <= now else 0.1}"/>'
            + write(x + CELL / 2, 44, f"{score:g}", 14, "white" if block <= now else "currentColor")
        )
    texts = (
        ("largest", "-inf" if largest == -math.inf else f"{largest:g}"),
        ("total", f"{total:.3f}"),
        ("sums", "D numbers"),
    )
    for place, (what, value) in enumerate(texts):
        x = 104 + 150 * place
        parts.append(
            f'<rect x="{x}" y="92" width="134" height="46" rx="4" fill="{WORDS[BLUE]}"/>'
            + write(x + 67, 111, what, 12, "white")
            + write(x + 67, 129, value, 14, "white")
        )
        if fade and place:
            parts.append(write(x + 67, 84, fade, 13, WORDS[ORANGE]))
    return picture(104 + 8 * (CELL + 2) + 40, 150, parts)


def hidden_blocks(blocks: int = 8) -> None:
    """Show which blocks of the square a causal kernel computes, in part or whole, and which it skips."""
    left, top, parts = 130, 34, []
    for i in range(blocks):
        for j in range(blocks):
            color, strength = (WORDS[BLUE], 0.9) if j < i else (WORDS[ORANGE], 0.9)
            if j > i:
                color, strength = "currentColor", 0.08
            parts.append(
                f'<rect x="{left + SIDE * j}" y="{top + SIDE * i}" width="{SIDE - 2}" height="{SIDE - 2}" '
                f'fill="{color}" fill-opacity="{strength}"/>'
            )
    middle = SIDE * blocks / 2
    parts += [
        write(left + middle, 22, "blocks of keys", 13),
        write(left - 12, top + middle, "blocks of queries", 13, at="end"),
    ]
    x = left + SIDE * blocks + 24
    for line, (color, text) in enumerate(
        ((BLUE, "computed"), (ORANGE, "computed, half is hidden"), (MUTED, "skipped"))
    ):
        y = top + 70 + 34 * line
        fill = f'fill="{WORDS[color]}"' if color != MUTED else 'fill="currentColor" fill-opacity="0.12"'
        parts.append(
            f'<rect x="{x}" y="{y}" width="16" height="16" {fill}/>'
            + write(x + 24, y + 13, text, 13, at="start")
        )
    show(
        picture(x + 210, top + SIDE * blocks + 8, parts),
        f"The square in blocks, with {blocks} blocks of queries: a causal kernel computes "
        f"{blocks * (blocks + 1) // 2} of {blocks**2}.",
        alt="A square of 8 x 8 blocks. Those below the diagonal are computed, those on it are computed and "
        "half hidden, and those above it are skipped.",
    )
