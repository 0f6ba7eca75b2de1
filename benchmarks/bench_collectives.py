"""Our collectives in turns with torch.distributed's over gloo, and the cost model's predictions.

The goals, as shares of gloo's time: an all-reduce takes at most 0.25 where the tensor lies in shared memory,
and 0.70 where it is copied in and out. A ring of our messages takes 1.10 from 16 MB on, a reduce-scatter
0.75.
"""

from __future__ import annotations

from typing import Any

import pytest

from minidist.benchmarks.harness import collective_timing
from minidist.benchmarks.harness.formats import binary_size
from minidist.benchmarks.harness.training.rounds import Worlds
from minidist.benchmarks.harness.turns import Benchmark, case, compared, record

GLOO = "Collectives of CPU ranks beside torch.distributed over gloo"
MODEL = "All-reduce on {} ranks: measured, and predicted from alpha, beta and gamma"

LIMITS = {
    "in place": 0.25,
    "copied": 0.70,
    "ring": 1.10,
    "reduce-scatter": 0.75,
    "reduce-scatter, sockets": 0.75,
}
LABELS = {
    "in place": "all-reduce in shared memory",
    "copied": "all-reduce through shared memory",
    "ring": "all-reduce by our ring",
    "reduce-scatter": "reduce-scatter through shared memory",
    "reduce-scatter, sockets": "reduce-scatter over sockets",
    "all-gather": "all-gather through shared memory",
    "broadcast": "broadcast through shared memory",
    "all-to-all": "all-to-all through shared memory",
}
QUICK = (2**16, 2**20, 2**24)
ALL = (2**16, 2**18, 2**20, 2**22, 2**24, 2**26)

CASES = [
    case(variant, size, quick=size in quick)
    for variant in LABELS
    for quick in [QUICK if variant in LIMITS else (2**20,)]  # one size for each form without a goal
    for size in ALL
    if variant != "ring" or size >= 2**24
]
ALGORITHMS = ("torch", "shared_memory", "ring", "tree", "naive")
SWEEP = (2**10, 2**13, 2**16, 2**18, 2**20, 2**22, 2**24)


@compared(GLOO)
@pytest.mark.parametrize(("variant", "size"), CASES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_against_gloo(
    benchmark: Benchmark, full: bool, worlds: Worlds, ranks: int, variant: str, size: int
) -> None:
    """The same tensor, rewritten before each call."""
    timed = worlds(ranks).run(collective_timing.time_against_torch, variant, size, rounds=15 if full else 7)
    collective_timing.enter(benchmark, timed, variant, size, LABELS[variant], "gloo")
    if variant in LIMITS:
        benchmark.extra_info["goal"] = {"of": "ratio", "below": LIMITS[variant]}


def measured(worlds: Worlds, full: bool, ranks: int) -> Any:
    """What `sweep` returns for a number of ranks."""
    return worlds(ranks).run(collective_timing.sweep, ALGORITHMS, SWEEP, 9 if full else 5)[0]


@compared(MODEL.format(2))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", SWEEP)
def test_prediction_2(benchmark: Benchmark, timed: Any, algorithm: str, size: int) -> None:
    """A point of the sweep: its time, and the prediction of a model fitted just before."""
    _point(benchmark, timed(2), algorithm, size)


@compared(MODEL.format(4))
@pytest.mark.full_only
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", SWEEP)
def test_prediction_4(benchmark: Benchmark, timed: Any, algorithm: str, size: int) -> None:
    """The same with four ranks, which may outnumber the cores."""
    _point(benchmark, timed(4), algorithm, size)


def _point(benchmark: Benchmark, swept: Any, algorithm: str, size: int) -> None:
    found, fits = swept
    seconds, predicted = found[algorithm, size]
    record(benchmark, seconds)
    benchmark.extra_info |= {
        "label": f"{algorithm}, {binary_size(size)}",
        "series": algorithm,
        "bytes": size,
        "predicted": predicted,
        "median_error": collective_timing.median_error(found),
        "fit": fits[algorithm],
    }
