"""The headline: a first figure of everything, measured before all else, in under a minute on two idle cores.

The CPU ladder at one size beside NumPy, an all-reduce beside gloo, and a training step of five strategies
beside torch's. Few rounds and one size each; the other suites measure the same with more of both.
"""

from __future__ import annotations

from typing import Any

import pytest

from minidist.benchmarks.bench_cpu_matmul import LADDER, beside_blas
from minidist.benchmarks.harness.collective_timing import enter as enter_collective
from minidist.benchmarks.harness.collective_timing import time_against_torch
from minidist.benchmarks.harness.formats import binary_size
from minidist.benchmarks.harness.training.rounds import Measured, Worlds, enter, measure
from minidist.benchmarks.harness.training.strategies import Pair, pairs
from minidist.benchmarks.harness.training.what_is_trained import Work
from minidist.benchmarks.harness.turns import Benchmark, compared
from minidist.kernels import Rung

SIZE = 128  # three Python loops take half a second here, and four seconds at the next size
LAST = 1024  # for the last two rungs, which need room for their blocks and threads
LAYOUTS = ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2,micro_batches=4", "tp=2")
STEPS = [
    pair
    for pair in pairs("byte-small")
    if pair.row.layout in LAYOUTS
    and pair.peer.startswith("torch")
    and (pair.row.layout != "dp=2" or pair.row.strategy == "data parallel, overlap")
]
BYTES = 2**22
WORK = Work("byte-small", rows=4)


@pytest.mark.parametrize(
    ("step", "size"),
    [*((step, SIZE) for step in LADDER[:-1]), *((step, LAST) for step in LADDER[-2:])],
    ids=lambda value: value.name if isinstance(value, Rung) else str(value),
)
@compared("Headline: a product of two matrices, beside NumPy")
def test_ladder(benchmark: Benchmark, step: Rung, size: int) -> None:
    """A rung's product in float32, on one core; the last rung's on all."""
    beside_blas(benchmark, step, (size,) * 3, "float32", budget=0.3)
    benchmark.extra_info["label"] = f"{step.name}, {size}"


@compared("Headline: an all-reduce on 2 ranks, beside gloo")
def test_all_reduce(benchmark: Benchmark, worlds: Worlds) -> None:
    """An all-reduce in shared memory."""
    timed = worlds(2).run(time_against_torch, "in place", BYTES, rounds=7)
    enter_collective(benchmark, timed, "in place", BYTES, "all-reduce in shared memory", "gloo")
    benchmark.extra_info["label"] = f"all-reduce, {binary_size(BYTES)}"


def measured(worlds: Worlds, _: bool) -> Measured:
    """All strategies and their peers in turns."""
    return measure(worlds, WORK, STEPS, rounds=5, each=0.6)


@compared("Headline: a training step on 2 ranks, a byte GPT of 3 M parameters, 4 rows of 128, beside torch")
@pytest.mark.parametrize("pair", STEPS, ids=lambda pair: pair.row.layout)
def test_step(benchmark: Benchmark, timed: Any, pair: Pair) -> None:
    """One step: forward, backward, communication, update."""
    enter(benchmark, pair, WORK, timed())
    for name in ("strategy", "layout"):  # the table of strategies has rows with more rounds
        del benchmark.extra_info[name]
