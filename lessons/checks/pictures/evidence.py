"""What a hunter of mistakes sees: a page with numbered lines, what differs, and the score (lesson 16)."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from checks.figures import BLUE, GREEN, INK, MUTED, ORANGE, RED, draw, name, show

LEVELS = {0: "watched the loss", 200: "on call", 350: "reviewer", 450: "detective"}
"""What a score of six cases is called, from so many points on; from par on it is "at par"."""


def page(title: str, report: str, rung: str, lines: Sequence[str]) -> None:
    """Show a user's report, and below it the page with numbered lines."""
    from IPython.display import HTML, display

    rows, words = [], False
    for number, line in enumerate(lines, 1):
        quotes = line.count('"""')
        muted = words or quotes or line.lstrip().startswith("#")
        words ^= quotes % 2 == 1
        code, mark, comment = (line, "", "") if muted else line.partition("  # ")
        text = f'<span style="opacity: 0.62">{html.escape(mark + comment)}</span>' if comment else ""
        code = f'<span style="opacity: 0.62">{html.escape(code)}</span>' if muted else html.escape(code)
        rows.append(f'<span style="user-select: none; opacity: 0.5">{number:4}  </span>{code}{text}')
    display(
        HTML(
            f'<div style="max-width: 960px"><p><b>{html.escape(title)}</b> “{html.escape(report)}”</p>'
            f'<div style="border: 1px solid; border-radius: 4px; padding: 0.3em 0.6em">'
            f'<div style="opacity: 0.7; font-size: 90%">{rung}.py, {len(lines)} lines</div>'
            '<pre style="max-height: 44em; overflow: auto; margin: 0.4em 0 0; font-size: 12px; '
            'line-height: 1.4; background: transparent; color: inherit">'
            f"{chr(10).join(rows)}</pre></div></div>"
        )
    )


def losses(found: Sequence[float], right: Sequence[float]) -> None:
    """Show the losses of the page, and those of one process."""
    figure, axes = draw(height=2.4)
    axes.plot(right, color=MUTED, linewidth=4)
    axes.plot(found, color=BLUE, linewidth=1.3)
    ends = sorted([(found[-1], "with the mistake", BLUE), (right[-1], "one process", INK)])
    for (value, text, color), dy in zip(ends, (-7, 7), strict=True):
        name(axes, len(right) - 1, value, text, color, dy=dy)
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    apart = max(abs(a - b) for a, b in zip(found, right, strict=True))
    show(
        figure,
        f"The losses of {len(right)} steps. They differ by {apart:.2g} at most.",
        alt="Two curves of the loss over the steps: with the mistake, and of one process.",
    )


def strip(what: str, differs: Mapping[str, Sequence[float]], in_a_row: int = 38) -> None:
    """Show which parameters differ from one process: a square for each, a line for each rank."""
    side, left, ranks = 17, 58, len(next(iter(differs.values())))
    high, parts = side * ranks + 150, []
    for place, (key, each) in enumerate(differs.items()):
        x, top = left + side * (place % in_a_row), 6 + high * (place // in_a_row)
        for rank, by in enumerate(each):
            color, says = (RED, f"differs by {by:.2g} of its size") if by else ("currentColor", "equal")
            parts.append(
                f'<rect x="{x}" y="{top + side * rank}" width="{side - 2}" height="{side - 2}" rx="2" '
                f'fill="{color}" opacity="{0.35 + 0.65 * min(1, by) if by else 0.1:.2f}">'
                f"<title>{key}, rank {rank}: {says}</title></rect>"
            )
            if place % in_a_row == 0:
                parts.append(
                    f'<text x="{left - 8}" y="{top + side * rank + 12}" font-size="11" text-anchor="end" '
                    f'fill="currentColor">rank {rank}</text>'
                )
        parts.append(
            f'<text transform="translate({x + 4} {top + side * ranks + 8}) rotate(60)" font-size="10" '
            f'font-weight="{600 if any(each) else 400}" fill="currentColor">{key}</text>'
        )
    width, height = left + side * in_a_row + 62, 6 + high * ((len(differs) - 1) // in_a_row + 1)
    wrong = [key for key, each in differs.items() if any(each)]
    show(
        f'<svg viewBox="0 0 {width} {height}" style="width: 100%; max-width: {width}px" '
        f'font-family="system-ui, sans-serif">{"".join(parts)}</svg>',
        f"{len(wrong)} of {len(differs)} {what} differ from those of one process (red; the stronger, the "
        "more).",
        alt=f"A square for each parameter and rank; these differ: {', '.join(wrong) or 'none'}.",
    )


def scoreboard(cases: Sequence[tuple[str, int | None, int]], begin: int = 100) -> None:
    """Show each case's title, its points (None while it is open), and par."""
    figure, axes = draw(height=0.9 + 0.4 * len(cases))
    for row, (_, points, par) in enumerate(cases):
        color = GREEN if points is not None and points >= par else ORANGE
        axes.barh(row, points or 0, height=0.62, color=color)
        axes.plot([par, par], [row - 0.42, row + 0.42], color=INK, linewidth=1.6)
        name(axes, begin, row, "open" if points is None else str(points))
    axes.set_yticks(range(len(cases)), [title for title, _, _ in cases])
    axes.set(xlim=(0, begin * 1.12), ylim=(len(cases) - 0.4, -0.6), xlabel="points")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    total, par = sum(points or 0 for _, points, _ in cases), sum(par for *_, par in cases)
    level = "at par" if total >= par else LEVELS[max(least for least in LEVELS if least <= total)]
    following = [f"{least}: {text}" for least, text in LEVELS.items() if least > total]
    following += [f"{par}: at par"] * (total < par)
    show(
        figure,
        f"{total} of {begin * len(cases)} points: {level}. "
        + (f"Next, from {following[0]}. " if following else "")
        + "The upright lines are par.",
        alt="A bar for each case with its points, and a line where par is.",
    )
