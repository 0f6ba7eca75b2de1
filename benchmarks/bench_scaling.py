"""Strong and weak scaling, with one thread a rank: the time of a step on n ranks against one.

Strong: the same 8 rows on more ranks; ideal is 1/n of the time. Weak: 4 rows for each rank; ideal is the same
time. All sizes take turns with one rank, round by round. The efficiency is the ideal time over the measured
one, the median over rounds. A byte GPT of 3 M parameters; ranks share cores where they outnumber them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from minidist.benchmarks.harness.training.programs import engine
from minidist.benchmarks.harness.training.rounds import Job, Measured, Worlds, measure_jobs, warm_worlds
from minidist.benchmarks.harness.training.what_is_trained import Work
from minidist.benchmarks.harness.turns import Benchmark, case, compared, record
from minidist.comm.launching.cores import available_cores

MODEL, ROWS, ROWS_A_RANK = "byte-small", 8, 4
TITLES = {
    "strong": f"Strong scaling: a byte GPT of 3 M parameters, {ROWS} rows of 128",
    "weak": f"Weak scaling: a byte GPT of 3 M parameters, {ROWS_A_RANK} rows of 128 for each rank",
}
LAYOUTS = {
    "data parallel": "dp={}",
    "ZeRO-2": "dp={},zero=2",
    "tensor parallel": "tp={}",
    "pipeline": "pp={},micro_batches=4",
}
"""The layouts of each series, by the number of ranks."""
MOST = {"tensor parallel": 4, "pipeline": 4}
"""Numbers of ranks that can share the model: it has four heads and six layers."""
CORES = available_cores()


def sizes(series: str) -> list[int]:
    """Numbers of ranks: up to four on any machine, then up to all cores."""
    found = [1, 2, 4]
    while 2 * found[-1] <= min(CORES, ROWS):
        found.append(2 * found[-1])
    return [size for size in found if size <= MOST.get(series, size)]


def rows_of(kind: str, ranks: int) -> int:
    """Rows of a global batch."""
    return ROWS if kind == "strong" else ROWS_A_RANK * ranks


def quick(kind: str, ranks: int) -> bool:
    """Whether a quick run includes it: the finding rests on strong scaling over at most all cores."""
    return kind == "strong" and ranks <= max(2, CORES)


def jobs(kind: str, full: bool) -> dict[str, Job]:
    """One rank, and every series at every size."""
    made = {"one rank": Job(1, Work(MODEL, rows_of(kind, 1)), partial(engine, "dp=1"))}
    for series, layout in LAYOUTS.items():
        for ranks in sizes(series)[1:]:
            if full or quick(kind, ranks):
                make = partial(engine, layout.format(ranks))
                made[f"{series} {ranks}"] = Job(ranks, Work(MODEL, rows_of(kind, ranks)), make)
    return made


def efficiency(kind: str, ranks: int, seconds: Sequence[float], one: Sequence[float]) -> float:
    """The ideal time over the measured one, the median over rounds; 1 is perfect."""
    ideal = ranks if kind == "strong" else 1
    return statistics.median(a / (ideal * b) for a, b in zip(one, seconds, strict=True))


def measured(_: Worlds, full: bool, kind: str) -> Measured:
    """All sizes of a kind of scaling in turns, on ranks with one thread each."""
    with warm_worlds(threads=1) as worlds:
        return measure_jobs(worlds, jobs(kind, full), *((15, math.inf) if full else (4, 1.0)))


def _cases(kind: str) -> list[Any]:
    return [
        case(series, ranks, name=f"{series}, {ranks}", quick=quick(kind, ranks))
        for series in LAYOUTS
        for ranks in sizes(series)
    ]


def enter(benchmark: Benchmark, measured: Measured, kind: str, series: str, ranks: int) -> None:
    """Store the figures of a series at one size as the benchmark's result."""
    one = measured["one rank"].seconds
    timed = measured["one rank" if ranks == 1 else f"{series} {ranks}"]
    record(benchmark, timed.seconds, one if ranks > 1 else (), "one rank" if ranks > 1 else "")
    extra = benchmark.extra_info
    extra |= timed.figures(rows_of(kind, ranks)) | timed.memory
    extra |= {
        "label": f"{series}, {ranks} rank{'s' if ranks > 1 else ''}",
        "scaling": kind,
        "series": series,
        "size": ranks,
        "layout": LAYOUTS[series].format(ranks) if ranks > 1 else "dp=1",
        "model": MODEL,
        "efficiency": efficiency(kind, ranks, timed.seconds, one),
    }
    if ranks > CORES:
        extra["note"] = f"{ranks} ranks share {CORES} core{'s' if CORES > 1 else ''}"


@compared(TITLES["strong"])
@pytest.mark.parametrize(("series", "ranks"), _cases("strong"))
def test_strong(benchmark: Benchmark, timed: Any, series: str, ranks: int) -> None:
    """The same work on more ranks."""
    enter(benchmark, timed("strong"), "strong", series, ranks)


@compared(TITLES["weak"])
@pytest.mark.parametrize(("series", "ranks"), _cases("weak"))
def test_weak(benchmark: Benchmark, timed: Any, series: str, ranks: int) -> None:
    """More ranks with proportionally more work."""
    enter(benchmark, timed("weak"), "weak", series, ranks)
