"""The tables of pipeline schedules, recomputation policies and FP8 recipes, made of their records.

The site makes them anew (site_hooks.py). The pages hold them too, for readers of the repository: a test
compares. To write them there, run: python docs/tables.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from minidist import Layout
from minidist.model import config
from minidist.parallel import schedules
from minidist.parallel.contract.fp8_recipes import FP8_RECIPES, Fp8Recipe
from minidist.parallel.contract.recompute_policies import POLICIES
from minidist.parallel.training.fp8 import Fp8
from minidist.scale.memory import estimate
from minidist.scale.step_time.layer_work import LayerWork

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


def fp8_table() -> str:
    """Errors of a Linear's three products: the mean over rows of |error| / |row|."""
    rows = []
    for name, recipe in FP8_RECIPES.items():
        rows.append([f'`"{name}"`', recipe.scales, *map("{:.1%}".format, fp8_errors(recipe))])
    heads = ["`precision=`", "Scales", "y", "gradient of x", "gradient of W", "y, with large tokens"]
    return _table(heads, rows)


def fp8_errors(recipe: Fp8Recipe) -> list[float]:
    """Of normal numbers, and of y where one token of 64 is 10,000 times as large as the others."""
    generator, found = torch.Generator().manual_seed(0), []
    sizes = (256, 512), (384, 512), (256, 384)
    x, weight, gradient = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    for factor in (1.0, 1e4):
        results = []
        for low in (False, True):
            layer, inputs = nn.Linear(512, 384, bias=False, dtype=torch.float64), x.clone()
            inputs[::64] *= factor
            layer.weight.data = weight.clone()
            if low:
                Fp8(recipe, [""]).wrap(layer)
            y = layer(inputs.requires_grad_())
            y.backward(gradient)
            results.append((y.detach(), inputs.grad, layer.weight.grad))
        found += [float(((b - a).norm(dim=1) / a.norm(dim=1)).mean()) for a, b in zip(*results, strict=True)]
    return found[:4]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(
        f"| {' | '.join(line)} |\n" if line[0] != "---" else f"|{'|'.join(line)}|\n" for line in lines
    )


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "strategies/pipeline.md": ("| Schedule |", schedule_table),
    "guide/memory.md": ("| `recompute=` |", policy_table),
    "strategies/low_precision.md": ("| `precision=` |", fp8_table),
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
