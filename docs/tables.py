"""The tables of pipeline schedules and of recomputation policies, made of their records.

The site makes them anew (site_hooks.py). The pages hold them too, for readers of the repository: a test
compares. To write them there, run: python docs/tables.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from minidist import Layout
from minidist.model import config
from minidist.parallel import schedules
from minidist.parallel.contract.recompute_policies import POLICIES
from minidist.scale.memory import estimate
from minidist.scale.time.layer_work import LayerWork

DOCS = Path(__file__).parent
RANKS, MICRO_BATCHES = 4, 8
MODEL, ROWS = "gpt2-medium", 4


def schedule_table() -> str:
    """All schedules, those with several chunks twice if they take 2 and 4."""
    rows = []
    for name, kind in schedules.SCHEDULES.items():
        for chunks in [each for each in (1, 2, 4) if kind.takes_chunks(each)]:
            schedule = schedules.by_name(name, RANKS, MICRO_BATCHES, chunks)
            found = schedules.simulate(schedule)
            title = kind.title + (f", {chunks} chunks a rank" if kind.chunked else "")
            sent = sum(each.kind.startswith("send") for each in schedule[1])
            rows.append([title, f"{found.bubble:.1%}", f"{found.peak_activations[0] / chunks:g}", str(sent)])
    heads = [
        "Schedule",
        "Time that ranks wait",
        "Micro-batches that rank 0 holds",
        "Messages of a middle rank",
    ]
    return _table(heads, rows)


def policy_table() -> str:
    """What each policy keeps and computes again in a step of one model."""
    shape, rows = config(MODEL), []
    layers = range(shape.layers + 2)
    work = LayerWork(shape, ROWS, shape.context, shape.context, 2)
    for name, keeps in {
        "": "all activations",
        **{name: each.keeps for name, each in POLICIES.items()},
    }.items():
        layout = Layout(precision="bf16", recompute=name or False)
        kept = estimate(shape, layout, batch=ROWS).activations / 1e9
        again = work.again(layers, layout.recompute).flops / work.layers(layers).forward.flops
        rows.append([f'`"{name}"`' if name else "`False`", keeps, f"{kept:.1f} GB", f"{again:.0%}"])
    return _table(["`recompute=`", "What is kept", "Activations", "Forward pass done again"], rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(
        f"| {' | '.join(line)} |\n" if line[0] != "---" else f"|{'|'.join(line)}|\n" for line in lines
    )


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "strategies/pipeline.md": ("| Schedule |", schedule_table),
    "guide/memory.md": ("| `recompute=` |", policy_table),
}
"""By page: how the table begins, and what makes it."""


def place_of(page: str) -> re.Pattern[str]:
    """The table in a page's text."""
    return re.compile(re.escape(TABLES[page][0]) + r".*?\n(?=\n|$)", re.DOTALL)


def renewed(page: str, text: str) -> str:
    """A page's text with its table made anew, if it has one."""
    return place_of(page).sub(lambda _: TABLES[page][1](), text) if page in TABLES else text


if __name__ == "__main__":
    for page in TABLES:
        (DOCS / page).write_text(renewed(page, (DOCS / page).read_text()))
