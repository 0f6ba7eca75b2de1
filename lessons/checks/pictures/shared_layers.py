"""Layers that two ranks share, and what lies between them (lesson 13)."""

from __future__ import annotations

from checks.figures import BLUE, GREEN, ORANGE, show
from checks.support.animations import color

SIZES = {"x": (46, 40), "a": (92, 46), "h": (92, 40), "b": (46, 92), "y": (46, 40)}
PLACES = {"x": 62, "a": 142, "h": 268, "b": 394, "y": 474, "sum": 610}
HIGH = 116


def shared_mlp() -> None:
    """Two ranks with an MLP: columns of a, rows of b, and one sum."""
    marks = []
    for rank, own in enumerate((BLUE, ORANGE)):
        middle = 74 + HIGH * rank

        def box(
            key: str, at: str, part: str, opacity: float = 1.0, own: str = own, middle: int = middle
        ) -> None:
            width, height = SIZES[key]
            left, top = PLACES[at], middle - height / 2
            x, y, w, h = left, top, width, height
            second = own == ORANGE
            if part == "columns":
                x, w = left + width / 2 * second, width / 2
            if part == "rows":
                y, h = top + height / 2 * second, height / 2
            fill = "currentColor" if part == "grey" else color(GREEN if part == "sum" else own)
            strength = 0.3 if part == "grey" else opacity
            marks.append(
                f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}" opacity="{strength}"/>'
            )
            marks.append(
                f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" '
                'stroke="currentColor"/>'
            )

        box("x", "x", "grey")
        box("a", "a", "columns")
        box("h", "h", "columns")
        box("b", "b", "rows")
        box("y", "y", "whole", opacity=0.45)
        box("y", "sum", "sum")
        for place, sign in ((126, "@"), (251, "="), (378, "@"), (457, "=")):
            marks.append(_text(place, middle + 5, sign, 15))
        marks.append(_text(28, middle + 5, f"rank {rank}"))
        marks.append(
            f'<path d="M 526 {middle} L 602 {middle}" stroke="currentColor" fill="none" '
            'marker-end="url(#tip)"/>'
        )
    for key, at, words in (
        ("x", "x", "x"),
        ("a", "a", "columns of a"),
        ("h", "h", "gelu(x @ a)"),
        ("b", "b", "rows of b"),
        ("y", "y", "a summand"),
        ("y", "sum", "y"),
    ):
        marks.append(_text(PLACES[at] + SIZES[key][0] / 2, 18, words))
    marks.append(
        f'<path d="M 564 74 L 564 {74 + HIGH}" stroke="{color(GREEN)}" stroke-width="5" fill="none"/>'
    )
    marks.append(_text(564, 74 + HIGH + 26, "all-reduce"))
    picture = (
        '<svg viewBox="0 0 670 246" style="width: 100%; max-width: 670px" '
        'font-family="system-ui, sans-serif">'
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
        f'<path d="M 0 0 L 6 3 L 0 6 z" fill="currentColor"/></marker></defs>{"".join(marks)}</svg>'
    )
    show(
        picture,
        "An MLP that two ranks share. Each has the coloured half of a and of b. The only message is the sum.",
        alt="Two ranks. Each multiplies the whole x with its half of the columns of a, gets its half of the "
        "columns in the middle, multiplies them with its half of the rows of b, and gets a summand as large "
        "as y. An all-reduce makes y of both.",
    )


PARTS = ("norm", "attention", "dropout, sum", "norm", "MLP", "dropout, sum")
TENSOR = ("", "all-reduce", "", "", "all-reduce", "")
SEQUENCE = ("all-gather", "reduce-scatter", "", "all-gather", "reduce-scatter", "")


def stream() -> None:
    """What one of two ranks keeps along a block, without and with sequence parallelism."""
    marks = []
    left, width, gap, full = 20, 88, 22, 54
    for row, (title, messages) in enumerate(
        (("tensor parallel", TENSOR), ("and sequence parallel", SEQUENCE))
    ):
        top = 40 + 132 * row
        marks.append(_text(left, top - 16, title, 13, "start", bold=True))
        for place, part in enumerate(PARTS):
            x = left + place * (width + gap)
            shared = part in ("attention", "MLP")
            half = shared or row
            fill = color(BLUE if shared else GREEN)
            across = shared or not row
            w, h = (width / 2, full) if shared else (width, full / 2 if half and not across else full)
            marks.append(f'<rect x="{x}" y="{top}" width="{w}" height="{h}" fill="{fill}" opacity="0.85"/>')
            marks.append(
                f'<rect x="{x}" y="{top}" width="{width}" height="{full}" fill="none" stroke="currentColor"/>'
            )
            marks.append(_text(x + width / 2, top + full + 17, part, 12))
            if messages[place]:
                words = messages[place].split("-")
                marks.append(_text(x + width + gap / 2, top + full + 36, "-".join(words), 11.5))
                marks.append(
                    f'<path d="M {x + width + gap / 2} {top + 6} L {x + width + gap / 2} {top + full + 24}" '
                    f'stroke="{color(ORANGE)}" stroke-width="4"/>'
                )
    picture = (
        '<svg viewBox="0 0 690 278" style="width: 100%; max-width: 690px" '
        'font-family="system-ui, sans-serif">'
        f"{''.join(marks)}</svg>"
    )
    show(
        picture,
        "What the first of two ranks keeps along a block, forward. A box of half the height has half of the "
        "tokens, and one of half the width half of the features. Orange: messages.",
        alt="Six parts of a block in two rows. With tensor parallelism attention and MLP keep half of the "
        "features and all else keeps everything, with an all-reduce after each shared part. With sequence "
        "parallelism all else keeps half of the tokens, with an all-gather before each shared part and a "
        "reduce-scatter after it.",
    )


def _text(
    x: float, y: float, words: str, size: float = 12.5, anchor: str = "middle", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="currentColor"{weight}>'
        f"{words}</text>"
    )
