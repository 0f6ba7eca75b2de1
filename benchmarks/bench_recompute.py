"""Time and memory of recomputing activations: a step with it and without, in turns.

A byte GPT of 3 M parameters in one process. Recomputing whole layers costs about another forward pass, and
saves all activations but the layers' inputs. Recomputing attention alone costs less and saves less.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

import minidist as md
from minidist.benchmarks.harness.training.programs import EngineProgram
from minidist.benchmarks.harness.training.rounds import Job, Measured, Worlds, measure_jobs, require_alike
from minidist.benchmarks.harness.training.what_is_trained import ADAMW, Work
from minidist.benchmarks.harness.turns import Benchmark, compared, record
from minidist.parallel.training.recompute import recompute

GROUP = "Recomputing activations: a byte GPT of 3 M parameters, {} of 128"
KEPT = "all activations kept"
PARTS: dict[str, list[str] | None] = {"whole layers": None, "attention": ["layers.*.attention"]}
WORK = Work("byte-small", rows=8, tied=True)


def recomputing(name: str, work: Work) -> EngineProgram:
    """Make a training loop that recomputes what this row says."""
    model = work.build()
    if name in PARTS:
        recompute(model, PARTS[name])
    return EngineProgram(md.prepare(model, ADAMW))


def measured(worlds: Worlds, full: bool) -> Measured:
    """All rows in turns."""
    jobs = {name: Job(1, WORK, partial(recomputing, name)) for name in (*PARTS, KEPT)}
    return measure_jobs(worlds, jobs, *((20, math.inf) if full else (6, 1.5)))


@compared(GROUP.format("8 rows"))
@pytest.mark.parametrize("part", PARTS)
def test_recompute(benchmark: Benchmark, timed: Any, part: str) -> None:
    """The same step up to rounding, in less memory."""
    found = timed()
    require_alike(found, part, KEPT, rtol=1e-4)
    record(benchmark, found[part].seconds, found[KEPT].seconds, KEPT)
    with_it, without = (found[name].fullest.activations / 1e6 for name in (part, KEPT))
    benchmark.extra_info |= {
        "label": part,
        "ranks": 1,
        "note": f"{with_it:.1f} MB of activations instead of {without:.1f} MB",
    }
