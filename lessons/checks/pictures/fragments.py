"""Which elements a lane holds of A, B and C, the bits of small numbers, and their cost (lesson 6)."""

from __future__ import annotations

from collections.abc import Mapping

from checks.figures import BLUE, GREEN, ORANGE, PINK, RED, SKY, WORDS, draw, name, show
from checks.pictures.threads import picture, write
from checks.support.animations import animate
from checks.tensor_cores import places

CELL = 15  # pixels
TOP = 46
MATRICES = (("a", "A", 16, 16, BLUE, 34), ("b", "B", 16, 8, ORANGE, 330), ("c", "C and D", 16, 8, GREEN, 506))
FORMATS = (("float32", 8, 23), ("TF32", 8, 10), ("bfloat16", 8, 7), ("float16", 5, 10))


def fragments() -> None:
    """Animate the elements that a lane holds, for several lanes."""
    frames = []
    for lane in (0, 1, 2, 3, 4, 5, 31):
        note = f"Lane {lane}: g = {lane} // 4 = {lane // 4}, t = {lane} % 4 = {lane % 4}."
        frames.append((note, _held(lane)))
    animate(
        frames,
        "The elements of A, B and C that one lane holds. The number in a cell says which of the lane's "
        "elements it is.",
        alt="Matrices A of 16 by 16, B of 16 by 8, and C of 16 by 8. Lane 0 holds 8 elements of A: row 0, "
        "columns 0 and 1, then row 8, columns 0 and 1, then the same rows in columns 8 and 9. Of B it holds "
        "rows 0, 1, 8 and 9 of column 0, and of C rows 0 and 8 of columns 0 and 1. The lanes after it hold "
        "what lies beside that, two columns of A further on, and every fourth lane begins a new row.",
        pause=2400,
    )


def _held(lane: int) -> str:
    parts = []
    for operand, title, rows, columns, color, left in MATRICES:
        parts.append(write(left + columns * CELL / 2, 16, f"{title}, {rows} x {columns}", 13))
        held = {tuple(place): i for i, place in enumerate(places(operand)[lane].tolist())}
        for column in range(columns):
            parts.append(write(left + (column + 0.5) * CELL - 0.5, TOP - 6, str(column), 8))
        for row in range(rows):
            y = TOP + row * CELL
            parts.append(write(left - 4, y + 11, str(row), 8, at="end"))
            for column in range(columns):
                x, which = left + column * CELL, held.get((row, column))
                fill, strength = ("currentColor", 0.08) if which is None else (WORDS[color], 1)
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{fill}" '
                    f'fill-opacity="{strength}"/>'
                )
                if which is not None:
                    parts.append(write(x + CELL / 2 - 0.5, y + 11, str(which), 11, "white"))
    return picture(640, TOP + 16 * CELL + 4, parts)


def quarters() -> None:
    """Show A in four quarters, with the register that gets each, and the lanes that give the first."""
    side, left, parts = 16, 150, []
    for quarter, color in enumerate((BLUE, GREEN, ORANGE, RED)):
        x, y = left + quarter // 2 * (8 * side + 6), 28 + quarter % 2 * (8 * side + 6)
        for row in range(8):
            parts.append(
                f'<rect x="{x}" y="{y + row * side}" width="{8 * side}" height="{side - 1.5}" rx="2" '
                f'fill="{WORDS[color]}"/>'
            )
            if quarter == 0:
                parts.append(write(x - 8, y + row * side + 12, f"lane {row} gives", 11, at="end"))
        parts.append(write(x + 4 * side, y + 3 * side + 12, f"register {quarter}", 12, "white"))
    parts.append(write(left + 4 * side, 18, "columns 0 to 7", 12))
    parts.append(write(left + 12 * side + 6, 18, "columns 8 to 15", 12))
    show(
        picture(460, 44 + 16 * side, parts),
        "A in quarters of 8 x 8. A bar is a row of a quarter: 8 elements, 16 bytes, whose address one lane "
        "gives. All lanes get two elements of each quarter, in the register named.",
        alt="A matrix in four quarters: the upper left one goes to register 0, the lower left one to "
        "register 1, the upper right one to register 2, the lower right one to register 3. Beside the rows "
        "of the first stand lanes 0 to 7.",
    )


def formats() -> None:
    """Show the bits of four formats of floating-point numbers."""
    cell, parts = 15, []
    for line, (title, exponent, fraction) in enumerate(FORMATS):
        y = 26 + 34 * line
        parts.append(write(78, y + 15, title, 13, at="end"))
        for bit in range(1 + exponent + fraction):
            color = PINK if bit == 0 else SKY if bit <= exponent else BLUE
            parts.append(
                f'<rect x="{88 + bit * cell}" y="{y}" width="{cell - 1.5}" height="20" rx="1.5" '
                f'fill="{WORDS[color]}"/>'
            )
        end = 88 + (1 + exponent + fraction) * cell + 8
        parts.append(write(end, y + 15, f"1 + {exponent} + {fraction}", 12, at="start"))
    parts.append(write(95, 17, "sign", 11))
    parts.append(write(88 + 5 * cell, 17, "exponent", 11))
    parts.append(write(88 + 20 * cell, 17, "fraction", 11))
    show(
        picture(680, 166, parts),
        "The bits of four formats. The first bit of a number's value, always 1, is not stored: a fraction of "
        "10 bits makes 11 significant bits.",
        alt="Bars of bits: float32 has a sign, 8 bits of exponent and 23 of fraction; TF32 has 8 and 10; "
        "bfloat16 8 and 7; float16 5 and 10.",
    )


def rate_against_error(rates: Mapping[str, float | None], errors: Mapping[str, float], unit: str) -> None:
    """Show what each mode of a product reaches, and how exact it is; a mode without a rate is a line."""
    figure, axes = draw(height=3.3)
    known = [rate for rate in rates.values() if rate]
    for (mode, rate), color in zip(rates.items(), (BLUE, GREEN, ORANGE, PINK), strict=True):
        if rate:
            axes.plot(rate, errors[mode], "o", color=color, markersize=9)
            name(axes, rate, errors[mode], mode, color, dx=11)
        else:
            axes.axhline(errors[mode], color=color, linestyle="--", linewidth=1.2)
            name(axes, known[0], errors[mode], f"{mode}: no unit here to time it", color, dx=11, dy=-8)
    axes.set(
        xscale="log", yscale="log", xlabel="GFLOP/s on one core of this CPU", ylabel="relative error (rms)"
    )
    axes.set_xlim(min(known) / 1.6, max(known) * 2.6)
    axes.set_ylim(min(errors.values()) / 4, max(errors.values()) * 4)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:,.0f}" if f"{value:.0f}"[0] in "25" else "")
    said = ", ".join(f"{mode} {rate:,.0f}" for mode, rate in rates.items() if rate)
    show(
        figure,
        f"Products of 1024 x 1024 on one core, in GFLOP/s: {said}. Right is faster, down is more exact. "
        + (f"This CPU has {unit}." if unit else "This CPU has no products of bfloat16."),
        alt="Error against rate, both logarithmic. float32 and bf16x6 are the most exact, bf16x3 is in "
        "between, and bf16 is the fastest and the least exact.",
    )
