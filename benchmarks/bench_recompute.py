"""Time and memory of recomputing activations: a step with it and without, in turns.

A byte GPT of 3 M parameters in one process. Recomputing whole layers costs about another forward pass, and
saves all activations but the layers' inputs. Recomputing attention alone costs less and saves less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

import minidist as md
from minidist.benchmarks.harness.steps.training_steps import ADAMW, Case
from minidist.benchmarks.harness.turns import Benchmark, compared, record
from minidist.kernels.measure.harness import time_in_turns
from minidist.parallel.training.recompute import recompute

GROUP = "Recomputing activations: a byte GPT of 3 M parameters, {} of 128"
PARTS: dict[str, list[str] | None] = {"whole layers": None, "attention": ["layers.*.attention"]}
Steps = dict[str, tuple[list[float], list[float], int]]


@cache
def measured(rows: int, rounds: int, enough: float) -> Steps:
    """For each choice of layers, and "" for none: seconds, losses, and the peak of activations in bytes."""
    case, engines, losses = Case("byte-small", rows=rows), {}, {}
    batches = case.batches(rounds + 1)
    for name in (*PARTS, ""):
        model = case.build()
        if name:
            recompute(model, PARTS[name])
        engines[name], losses[name] = md.prepare(model, ADAMW), list[float]()

    def step(name: str) -> Callable[[], None]:
        return lambda: losses[name].append(engines[name].step(*batches[len(losses[name])]))

    seconds = time_in_turns({name: step(name) for name in engines}, rounds, enough)
    return {name: (seconds[name], losses[name], engines[name].memory().activations) for name in engines}


@compared(GROUP.format("8 rows"))
@pytest.mark.parametrize("part", PARTS)
def test_recompute(benchmark: Benchmark, full: bool, part: str) -> None:
    """The same step up to rounding, in less memory."""
    steps = measured(8, *((20, math.inf) if full else (6, 4.0)))
    ours, losses, activations = steps[part]
    peer, expected, without = steps[""]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    record(benchmark, ours, peer, "all activations kept")
    benchmark.extra_info |= {
        "label": part,
        "ranks": 1,
        "note": f"{activations / 1e6:.1f} MB of activations instead of {without / 1e6:.1f} MB",
    }
