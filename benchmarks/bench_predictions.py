"""A training step on this machine, beside the time that the model of time predicts for it.

For each number of ranks the machine is measured, and then at once, before it drifts, steps of two byte GPTs
are timed in turns in one launch: with data parallelism, ZeRO, tensor parallelism, pipelines and combinations.
That is done three times. `minidist bench predictions` takes minutes; run it while nothing else runs.

Where other users work on the machine, all steps of a launch take longer alike. So the note also has the ratio
over the median of its launch, which shows whether layouts are ranked rightly.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

import minidist as md
from minidist.benchmarks.harness.training.rounds import Worlds
from minidist.benchmarks.harness.turns import Benchmark, compared, record
from minidist.scale.planner.trial import NEAR, trial
from minidist.scale.step_time import StepTime, predict_step
from minidist.scale.step_time.measure_machine import this_machine

pytestmark = pytest.mark.no_finding
GROUP = "A training step beside its predicted time"
LAYOUTS: dict[int, tuple[str, ...]] = {
    1: ("dp=1", "micro_batches=4", "recompute=true"),
    2: ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "pp=2,micro_batches=4"),
    4: ("dp=4", "dp=4,zero=2", "dp=4,zero=3", "tp=4", "dp=2,tp=2", "dp=2,pp=2,micro_batches=4"),
    8: ("dp=8", "dp=8,zero=1", "dp=4,tp=2", "dp=2,tp=2,pp=2,micro_batches=2", "dp=2,pp=4,micro_batches=4"),
}
"""Layouts by number of ranks, as `Layout.parse` reads them."""
BATCHES = {"byte-small": (16, 128), "byte-tiny": (32, 64)}
"""Rows of the global batch and tokens in each row, by model."""
TURNS = 3
"""How often to measure the machine and then the steps."""
Turns = Mapping[tuple[str, str], list[tuple[float, StepTime]]]
"""By model and layout, the seconds of a step and the prediction, for each turn."""


def measure(ranks: int, rounds: int, models: Iterable[str] = tuple(BATCHES)) -> Turns:
    """Measure this machine, then so many steps of each layout of so many ranks; in turns."""
    found, layouts = defaultdict(list), [md.Layout.parse(text) for text in LAYOUTS[ranks]]
    for _ in range(TURNS):
        machine = this_machine((ranks,))
        for model in models:
            took = trial(model, layouts, BATCHES[model], rounds=rounds)
            for text, layout in zip(LAYOUTS[ranks], layouts, strict=True):
                step = predict_step(model, layout, BATCHES[model], machine)
                found[model, text].append((took[str(layout)], step))
    return found


def ratio(turns: list[tuple[float, StepTime]]) -> float:
    """Measured over predicted seconds, the median of the turns."""
    return statistics.median(took / step.seconds for took, step in turns)


def measured(_: Worlds, full: bool, ranks: int) -> Turns:
    """What `measure` finds for a number of ranks."""
    return measure(ranks, 5 if full else 2)


@compared(GROUP)
@pytest.mark.parametrize("model", BATCHES)
@pytest.mark.parametrize(("ranks", "layout"), [(n, text) for n, texts in LAYOUTS.items() for text in texts])
def test_step(benchmark: Benchmark, timed: Any, ranks: int, layout: str, model: str) -> None:
    """A step of one layout, and the parts of the predicted one."""
    found = timed(ranks)
    took, steps = zip(*found[model, layout], strict=True)
    record(benchmark, took, [step.seconds for step in steps], "the prediction")
    alike = statistics.median(ratio(turns) for (name, _), turns in found.items() if name == model)
    own = ratio(found[model, layout])
    parts = ", ".join(f"{name} {1e3 * value:.1f}" for name, value in steps[0].parts.items() if value > 5e-5)
    within = f"within {NEAR:.0%}" if abs(1 / own - 1) <= NEAR else f"off by more than {NEAR:.0%}"
    note = f"{within}; {own / alike:.2f} of its launch's ratio; predicted in ms: {parts}"
    benchmark.extra_info |= {"label": f"{model}, {layout}", "ranks": ranks, "note": note}
