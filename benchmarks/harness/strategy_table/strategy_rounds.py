"""Measure the table of strategies, one family at a time, with all programs of the family in turns.

A round runs every program of a family once: plain training in one process, each row, each peer. The programs
live on warm ranks, in one world for each number of ranks; idle worlds wait for a message. So all times of a
round, even with different numbers of ranks, see the same machine.

    over_yardstick                    a row's time over that of plain training in one process, with all cores
    over_yardstick_q1, .._q3          the middle half of the ratios of single rounds
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

import minidist as md
from minidist import comm
from minidist.benchmarks.harness.strategy_table.peers import INEXACT, missing
from minidist.benchmarks.harness.strategy_table.programs import COUNTED
from minidist.benchmarks.harness.strategy_table.strategies import YARDSTICK, Pair, Row, Work
from minidist.benchmarks.harness.strategy_table.strategy_steps import SEEN, Facts, drop, hold, turn
from minidist.benchmarks.harness.turns import Benchmark, compare, record
from minidist.kernels.measure import harness

TURN = 20e-3
"""Minimal seconds of a turn, which runs enough steps to fill them."""
MOST_STEPS = 50
TIMEOUT = 300
"""Time limit of a call in seconds; one call may be the whole measurement of a suite."""
Worlds = Callable[[int], md.Cluster]
"""A function from a number of ranks to a cluster of warm ranks."""


@contextmanager
def warm_worlds(threads: int | None = None) -> Iterator[Worlds]:
    """Start clusters on first use. threads: of each rank; by default the ranks share the cores."""
    made: dict[int, md.Cluster] = {}

    def get(ranks: int) -> md.Cluster:
        if ranks not in made:
            made[ranks] = md.Cluster(ranks, timeout=TIMEOUT, threads=threads)
        return made[ranks]

    try:
        yield get
    finally:
        for cluster in made.values():
            cluster.close()


@dataclass
class Timed:
    """The measurement of a program."""

    facts: list[Facts]  # one per rank
    seconds: list[float] = field(default_factory=list)  # of a step, one per round

    @property
    def losses(self) -> list[float]:
        """Losses of the first steps, each the mean over the ranks that know theirs."""
        steps = zip(*(each.losses for each in self.facts), strict=True)
        return [statistics.fmean(loss for loss in step if loss is not None) for step in steps]

    @property
    def fullest(self) -> Any:
        """Memory of the rank that holds most, or None if it was not counted."""
        counted = [each.memory for each in self.facts if each.memory is not None]
        return max(counted, key=lambda memory: memory.total) if len(counted) == len(self.facts) else None


Measured = dict[str, Timed]
"""Measurements by program: a row's `key`, a peer's name with its ranks, or the yardstick."""


class Job(NamedTuple):
    """A program to measure: a row's or a peer's."""

    ranks: int
    work: Work
    row: Row | None = None
    peer: str = ""
    period: int = 1  # steps after which its communication repeats; a turn has whole periods


def key(row: Row) -> str:
    """Return the name of a row's program."""
    return f"{row.strategy} {row.layout}"


def beside(pair: Pair) -> str:
    """Return the name of the program of a pair's peer."""
    return YARDSTICK if pair.peer == YARDSTICK else f"{pair.peer} {pair.row.ranks}"


def measure(
    worlds: Worlds, work: Work, family: Sequence[Pair], rounds: int, each: float = math.inf
) -> Measured:
    """Measure all programs of a family in turns; peers that can't be measured here are left out."""
    jobs = {YARDSTICK: Job(1, work, peer=YARDSTICK)}
    for pair in family:
        ranks, period = pair.row.ranks, pair.row.period
        jobs[key(pair.row)] = Job(ranks, work, pair.row, period=period)
        if pair.peer and missing(pair.peer) is None:
            jobs.setdefault(beside(pair), Job(ranks, work, peer=pair.peer, period=period))
    return measure_jobs(worlds, jobs, rounds, each)


def measure_jobs(worlds: Worlds, jobs: Mapping[str, Job], rounds: int, each: float = math.inf) -> Measured:
    """Measure programs in turns, each once per round. Skip the test where they use devices of two kinds.

    After `each` seconds for each program, `harness.LEAST` rounds suffice.
    """
    _refuse_two_kinds({ranks: worlds(ranks).run(_kind)[0] for ranks in {job.ranks for job in jobs.values()}})
    measured: Measured = {}
    holding: set[int] = set()
    # This process removes the files, since killed ranks would not.
    with tempfile.TemporaryDirectory(prefix="minidist-bench-", ignore_cleanup_errors=True) as scratch:
        try:
            for name, job in jobs.items():
                measured[name] = Timed(worlds(job.ranks).run(hold, name, scratch, *job[1:]))
                holding.add(job.ranks)
            for _ in harness.within(each * len(jobs), rounds):
                for name, job in jobs.items():
                    seconds = worlds(job.ranks).run(turn, name, _steps(measured[name], job.period))
                    measured[name].seconds.append(max(seconds))  # a step ends on the slowest rank
        finally:
            for ranks in holding:
                worlds(ranks).run(drop)
    return measured


def _kind() -> str:
    return comm.device().type


def _refuse_two_kinds(kinds: Mapping[int, str]) -> None:
    """kinds: of device, by the number of ranks. With fewer GPUs than ranks all ranks use CPUs."""
    if len({*kinds.values()}) > 1:
        found = ", ".join(f"{ranks} on {kind}" for ranks, kind in sorted(kinds.items()))
        pytest.skip(
            f"times of GPUs and CPUs are not compared, and so many ranks compute here: {found}; each needs a "
            "GPU to itself. Hide the GPUs with CUDA_VISIBLE_DEVICES='' to compare CPUs"
        )


def _steps(timed: Timed, period: int) -> int:
    """Return how many steps fill a turn, in whole periods."""
    once = max(facts.seconds for facts in timed.facts)
    steps = max(1, min(MOST_STEPS, math.ceil(TURN / once))) if once > 0 else 1
    return math.ceil(steps / period) * period


def check(pair: Pair, measured: Measured) -> None:
    """Raise AssertionError if the programs' losses differ, which makes the comparison meaningless."""
    expected = measured[YARDSTICK].losses
    for name, exact in ((key(pair.row), pair.row.exact), (beside(pair), pair.peer not in INEXACT)):
        if exact and name in measured:
            losses = measured[name].losses
            if not np.allclose(losses[:SEEN], expected[:SEEN], rtol=1e-3, atol=0):
                raise AssertionError(
                    f"the losses of {name} are {losses[:SEEN]}, not {expected[:SEEN]} as for {YARDSTICK}"
                )


def enter(benchmark: Benchmark, pair: Pair, work: Work, measured: Measured) -> None:
    """Store a line of the table as the benchmark's result."""
    check(pair, measured)
    row, ours = pair.row, measured[key(pair.row)]
    peer = measured.get(beside(pair)) if pair.peer else None
    record(benchmark, ours.seconds, peer.seconds if peer else (), pair.peer if peer else "")
    extra = benchmark.extra_info
    extra |= {
        "label": pair.label,
        "strategy": row.strategy,
        "layout": row.layout,
        "model": work.model,
        "ranks": row.ranks,
        "rows_per_s": work.rows / statistics.median(ours.seconds),
        "bytes_per_step": max(facts.bytes_per_step for facts in ours.facts),
        "comm_overlap": min(facts.comm_overlap for facts in ours.facts),
        "memory": vars(ours.fullest),
        "memory_source": COUNTED,
    }
    if peer and peer.fullest is not None:
        extra["peer_memory"] = peer.fullest.total
    extra |= over_yardstick(ours.seconds, measured[YARDSTICK].seconds)


def over_yardstick(ours: Sequence[float], yardstick: Sequence[float]) -> dict[str, Any]:
    """Compare with the yardstick, and return the figures under keys of their own."""
    found = compare(ours, yardstick, YARDSTICK)
    return {
        "yardstick": YARDSTICK,
        "yardstick_median": found["peer_median"],
        "over_yardstick": found["ratio"],
        "over_yardstick_q1": found["pair_ratio_q1"],
        "over_yardstick_q3": found["pair_ratio_q3"],
    }
