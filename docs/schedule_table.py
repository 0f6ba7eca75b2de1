"""The table of pipeline schedules in strategies/pipeline.md, made of their records.

The site makes it anew (site_hooks.py). The page holds it too, for readers of the repository: a test compares.
To write it there, run: python docs/schedule_table.py
"""

from __future__ import annotations

import re
from pathlib import Path

from minidist.parallel import schedules

PAGE = Path(__file__).parent / "strategies" / "pipeline.md"
TABLE = re.compile(r"\| Schedule \| Time .*?\n(?=\n)", re.DOTALL)
RANKS, MICRO_BATCHES = 4, 8


def table() -> str:
    """All schedules, those with several chunks twice if they take 2 and 4."""
    lines = [
        "| Schedule | Time that ranks wait | Micro-batches that rank 0 holds | Messages of a middle rank |"
    ]
    lines.append("|---|---|---|---|")
    for name, kind in schedules.SCHEDULES.items():
        for chunks in [each for each in (1, 2, 4) if kind.takes_chunks(each)]:
            schedule = schedules.by_name(name, RANKS, MICRO_BATCHES, chunks)
            found = schedules.simulate(schedule)
            sent = sum(each.kind.startswith("send") for each in schedule[1])
            title = kind.title + (f", {chunks} chunks a rank" if kind.chunked else "")
            held = f"{found.peak_activations[0] / chunks:g}"
            lines.append(f"| {title} | {found.bubble:.1%} | {held} | {sent} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(table(), PAGE.read_text()))
