"""Measure training programs in turns, on warm ranks.

A round runs every program once. The programs live in one world for each number of ranks; idle worlds wait for
a message. So all times of a round, even with different numbers of ranks, see the same machine. `measure` does
this with rows of the table of strategies (`strategies.py`), their peers, and plain training in one process:

    over_yardstick                    a row's time over that of plain training in one process, with all cores
    over_yardstick_q1, .._q3          the middle half of the ratios of single rounds
"""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import minidist as md
from minidist import comm
from minidist.benchmarks.harness.training.peers import INEXACT, PEERS, missing
from minidist.benchmarks.harness.training.programs import COUNTED, LOOPS, Program, Ran, engine
from minidist.benchmarks.harness.training.strategies import YARDSTICK, Pair, Row
from minidist.benchmarks.harness.training.what_is_trained import Batch, Work
from minidist.benchmarks.harness.turns import Benchmark, compare, record
from minidist.comm import ledgers
from minidist.comm.ledgers import Call
from minidist.kernels.measure.timing_in_turns import take_turns
from minidist.parallel.contract.memory_report import Memory

TURN = 20e-3
"""Minimal seconds of a turn, which runs enough steps to fill them."""
MOST_STEPS = 50
TIMEOUT = 300
"""Time limit of a call in seconds; one call may be the whole measurement of a suite."""
SEEN = 3
"""Number of steps whose losses are compared, to see whether two programs train alike."""
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


class Job(NamedTuple):
    """A program to measure."""

    ranks: int
    work: Work
    make: Callable[[Work], Program]  # called on all ranks
    period: int = 1  # steps after which its communication repeats; a turn has whole periods
    ours: bool = True  # whether it sends through `minidist.comm`, which counts its bytes
    warm: int = 0  # steps of a turn before the clock starts
    steps: int | None = None  # that are timed in a turn; None for as many as fill it


# In the ranks, which keep their programs between calls.


@dataclass(frozen=True)
class Facts:
    """A rank's measurement of a program's first steps."""

    losses: list[float | None]  # of the first `SEEN` steps
    seconds: float  # of a later step
    bytes_per_step: int  # sent by this rank through `minidist.comm`; 0 for a peer
    hidden: float  # see `UnderWay`
    memory: Memory | None


class Kept:
    """A program, its batches, and how many steps it has done."""

    def __init__(self, program: Program, batches: Sequence[Batch]) -> None:
        self.program, self.batches = program, batches
        self.steps = 0

    def run(self, steps: int, warm: int = 0) -> Ran:
        """Run some more steps, and time them after the first `warm`."""
        chosen = [self.batches[(self.steps + i) % len(self.batches)] for i in range(warm + steps)]
        self.steps += warm + steps
        return self.program.run(chosen, warm)


class UnderWay:
    """Watches this rank's calls while it is open: when one was under way, and when the rank waited for one.

    Calls that are under way together count once; a ledger's `comm_overlap` counts each of them.
    """

    def __init__(self) -> None:
        self._begun: dict[int, float] = {}
        self.spans: list[tuple[float, float]] = []
        self.waits: list[tuple[float, float]] = []

    def __enter__(self) -> UnderWay:
        ledgers.watchers.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        ledgers.watchers.remove(self)

    def called(self, call: Call, begun: float, returned: float, at_once: bool, complete: bool) -> None:
        """Note when a call began; the barrier before a step sends nothing of the step's."""
        if call.name != "barrier":
            self._begun[id(call)] = begun
            if not at_once:
                self.waited(call, begun, returned, None, None)

    def waited(
        self, call: Call, begun: float, ended: float, began: float | None, completed: float | None
    ) -> None:
        """Note that this rank has waited for a call."""
        if id(call) in self._begun:
            self.waits.append((begun, ended))
            self.spans.append((self._begun[id(call)], completed or ended))

    @property
    def hidden(self) -> float:
        """Share of the time with a call under way in which this rank did not wait for one."""
        under_way = covered([*self.spans, *self.waits])
        return 1 - covered(self.waits) / under_way if under_way else 0.0


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that lie in at least one span."""
    total, reached = 0.0, -math.inf
    for begun, ended in sorted(spans):
        total += max(0.0, ended - max(begun, reached))
        reached = max(reached, ended)
    return total


HELD: dict[str, Kept] = {}


def hold(name: str, job: Job) -> Facts:
    """Make a program, keep it, and run its first steps; more of them if it is ours, to count its bytes."""
    period = job.period
    kept = HELD[name] = Kept(job.make(job.work), job.work.batches())
    first = kept.run(SEEN)
    if SEEN % period:
        kept.run(period - SEEN % period)  # up to the start of the next period
    with comm.ledger() as ledger, UnderWay() as under_way:
        counted = kept.run(period)
    sent = 0
    if job.ours:  # the difference leaves out what is sent before and after the steps
        with comm.ledger() as longer:
            kept.run(2 * period)
        sent = (longer.bytes_sent - ledger.bytes_sent) // period
    return Facts(first.losses, counted.seconds, sent, under_way.hidden, kept.program.memory())


def turn(name: str, steps: int, warm: int = 0) -> float:
    """Run so many steps, and return the seconds of one."""
    return HELD[name].run(steps, warm).seconds


def drop() -> None:
    """Delete all programs."""
    HELD.clear()
    gc.collect()


def device_kind() -> str:
    """Return the kind of device that this rank computes on."""
    return comm.device().type


# In the main process.


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

    def figures(self, rows: int) -> dict[str, Any]:
        """Return what a report says of a step of so many rows, besides its time."""
        return {
            "ranks": len(self.facts),
            "rows_per_s": rows / statistics.median(self.seconds),
            "bytes_per_step": max(facts.bytes_per_step for facts in self.facts),
        }

    @property
    def memory(self) -> dict[str, Any]:
        """Return what a report says of the fullest rank's memory."""
        return {"memory": vars(self.fullest), "memory_source": COUNTED}


Measured = dict[str, Timed]
"""Measurements by program: a row's `key`, a peer's name with its ranks, or the yardstick."""


def measure_jobs(worlds: Worlds, jobs: Mapping[str, Job], rounds: int, each: float = math.inf) -> Measured:
    """Measure programs in turns, each once per round. Skip the test where they use devices of two kinds.

    After `each` seconds for each program, `LEAST` rounds suffice.
    """
    sizes = {job.ranks for job in jobs.values()}
    _refuse_two_kinds({ranks: worlds(ranks).run(device_kind)[0] for ranks in sizes})
    measured: Measured = {}

    def seconds_of(name: str, job: Job) -> float:
        steps = job.steps or steps_of(measured[name], job.period)
        seconds: list[float] = worlds(job.ranks).run(turn, name, steps, job.warm)
        return max(seconds)  # a step ends on the slowest rank

    try:
        for name, job in jobs.items():
            measured[name] = Timed(worlds(job.ranks).run(hold, name, job))
        timed = {name: partial(seconds_of, name, job) for name, job in jobs.items()}
        for name, seconds in take_turns(timed, rounds, each * len(jobs)).items():
            measured[name].seconds = seconds
    finally:
        for ranks in sizes:
            worlds(ranks).run(drop)
    return measured


def _refuse_two_kinds(kinds: Mapping[int, str]) -> None:
    """kinds: of device, by the number of ranks. With fewer GPUs than ranks all ranks use CPUs."""
    if len({*kinds.values()}) > 1:
        found = ", ".join(f"{ranks} on {kind}" for ranks, kind in sorted(kinds.items()))
        pytest.skip(
            f"times of GPUs and CPUs are not compared, and so many ranks compute here: {found}; each needs a "
            "GPU to itself. Hide the GPUs with CUDA_VISIBLE_DEVICES='' to compare CPUs"
        )


def steps_of(timed: Timed, period: int) -> int:
    """Return how many steps fill a turn, in whole periods."""
    once = max(facts.seconds for facts in timed.facts)
    steps = max(1, min(MOST_STEPS, math.ceil(TURN / once))) if once > 0 else 1
    return math.ceil(steps / period) * period


def require_alike(measured: Measured, name: str, expected: str, rtol: float = 1e-3) -> None:
    """Raise AssertionError if two programs' losses differ, which makes a comparison meaningless."""
    ours, other = (measured[each].losses[:SEEN] for each in (name, expected))
    if not np.allclose(ours, other, rtol=rtol, atol=0):
        raise AssertionError(f"the losses of {name} are {ours}, not {other} as for {expected}")


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


# Rows of the table of strategies.


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
    jobs = {YARDSTICK: Job(1, work, PEERS[YARDSTICK], ours=False)}
    # This process removes the files, since killed ranks would not.
    with tempfile.TemporaryDirectory(prefix="minidist-bench-", ignore_cleanup_errors=True) as scratch:
        for pair in family:
            row = pair.row
            jobs[key(row)] = Job(row.ranks, work, partial(program, row, scratch), row.period)
            if pair.peer and missing(pair.peer) is None:
                job = Job(row.ranks, work, PEERS[pair.peer], row.period, ours=False)
                jobs.setdefault(beside(pair), job)
        return measure_jobs(worlds, jobs, rounds, each)


def program(row: Row, scratch: str, work: Work) -> Program:
    """Make a row's program on a rank; scratch: a folder for its files."""
    options = row.options
    if row.offload:
        given = {"offload": tempfile.mkdtemp(dir=scratch)}
        options = {**options, **(given if row.loop else {"fully_shard": given})}
    return LOOPS[row.loop](work, **options) if row.loop else engine(row.layout, work, **options)


def check(pair: Pair, measured: Measured) -> None:
    """Raise AssertionError if a row or its peer does not train like one process."""
    for name, exact in ((key(pair.row), pair.row.exact), (beside(pair), pair.peer not in INEXACT)):
        if exact and name in measured:
            require_alike(measured, name, YARDSTICK)


def compare_pair(
    benchmark: Benchmark, pair: Pair, work: Work, measured: Measured, goal: float | None = None
) -> Timed:
    """Check a row, store its times beside its peer's as the benchmark's result, and return the row's.

    goal: for the ratio to the peer.
    """
    check(pair, measured)
    ours = measured[key(pair.row)]
    peer = measured.get(beside(pair)) if pair.peer else None
    record(benchmark, ours.seconds, peer.seconds if peer else (), pair.peer if peer else "")
    benchmark.extra_info |= {"label": pair.label, **ours.figures(work.rows)}
    if benchmark.extra_info["bytes_per_step"]:  # nothing is hidden of what is not sent
        benchmark.extra_info["hidden"] = min(facts.hidden for facts in ours.facts)
    if goal:
        benchmark.extra_info["goal"] = {"of": "ratio", "below": goal}
    return ours


def enter(benchmark: Benchmark, pair: Pair, work: Work, measured: Measured) -> None:
    """Store a line of the table as the benchmark's result."""
    ours, row, extra = compare_pair(benchmark, pair, work, measured), pair.row, benchmark.extra_info
    extra |= {"strategy": row.strategy, "layout": row.layout, "model": work.model, **ours.memory}
    peer = measured.get(beside(pair)) if pair.peer else None
    if peer and peer.fullest is not None:
        extra["peer_memory"] = peer.fullest.total
    extra |= over_yardstick(ours.seconds, measured[YARDSTICK].seconds)
