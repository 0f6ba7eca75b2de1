"""A training step through a pipeline of two ranks, in turns with torch's pipelining; and the measured bubble.

A byte GPT of 3 M parameters, 8 micro-batches, gloo. GPipe and 1F1B run in turns with the versions of
`torch.distributed.pipelining`; zero-bubble runs in the same rounds, without a peer. Then the share of a step
in which ranks wait, against the simulation's. The simulation takes the time of a message, and either the mean
time of each kind of pass, as a plan does, or each pass's own time, because ranks also wait for slow passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from minidist.benchmarks.harness.steps.pipeline_steps import (
    PEERS,
    Case,
    Timed,
    mean_times,
    message_seconds,
    passes,
    time_schedules,
    timeline,
    times,
)
from minidist.benchmarks.harness.strategy_table.strategy_rounds import Worlds
from minidist.benchmarks.harness.turns import Benchmark, compared, record
from minidist.parallel.contract.schedule_kinds import SCHEDULES
from minidist.parallel.pipeline import schedules

RANKS, CASE = 2, Case("byte-small", rows=16, micro_batches=8)
STEPS = "Pipelines: a byte GPT of 3 M parameters on 2 ranks, 16 rows of 128 in 8 micro-batches"
BUBBLE = "Pipelines: seconds in which ranks wait in a step, beside the simulation"
NAMES = [name for name, kind in SCHEDULES.items() if not kind.chunked]
Measure = Callable[[], list[dict[str, Timed]]]


@pytest.fixture(scope="module")
def timed(full: bool, worlds: Worlds) -> Measure:
    """Every schedule and its peer in turns, once."""

    @cache
    def measure() -> list[dict[str, Timed]]:
        return worlds(RANKS).run(time_schedules, CASE, NAMES, 40 if full else 6)

    return measure


@compared(STEPS)
@pytest.mark.no_finding
@pytest.mark.parametrize("name", NAMES)
def test_pipeline(benchmark: Benchmark, timed: Any, name: str) -> None:
    """One step: forward, backward, optimizer."""
    ranks = [rank[name] for rank in timed()]
    ours = [max(step) for step in zip(*(rank.ours for rank in ranks), strict=True)]
    extra = benchmark.extra_info
    if name in PEERS:  # the comparison means nothing unless both trained the same
        np.testing.assert_allclose(ranks[0].our_losses[:3], ranks[-1].peer_losses[:3], rtol=1e-3)
        peer = [max(step) for step in zip(*(rank.peer for rank in ranks), strict=True)]
        record(benchmark, ours, peer, f"torch {PEERS[name]}")
        extra["goal"] = {"of": "ratio", "below": 1.00}
    else:
        record(benchmark, ours)
    extra |= {"label": name, "ranks": RANKS, "rows_per_s": CASE.rows / float(np.median(ours))}
    extra["bytes_per_step"] = max(rank.bytes_per_step for rank in ranks)


@compared(BUBBLE)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in NAMES else [pytest.mark.no_finding]) for name in SCHEDULES],
)
def test_bubble(benchmark: Benchmark, full: bool, worlds: Worlds, name: str) -> None:
    """The share of time in which ranks wait, and what each rank did when in the median step."""
    message = max(worlds(RANKS).run(message_seconds, CASE))
    ranks = worlds(RANKS).run(passes, CASE, name, *((30, math.inf) if full else (8, 3.0)))
    chunks = SCHEDULES[name].least_chunks
    schedule = schedules.by_name(name, RANKS, CASE.micro_batches, chunks)
    placement = SCHEDULES[name].placement(RANKS, chunks)
    steps, waited, simulated, shares = [*zip(*ranks, strict=True)], [], [], []
    for step in steps:
        first, last = min(own[0].start for own in step), max(own[-1].end for own in step)
        seconds = RANKS * (last - first)
        waited.append(seconds - sum(each.end - each.start for own in step for each in own))
        expected = schedules.simulate(schedule, {**mean_times(step, placement), "message": message})
        simulated.append(expected.bubble * RANKS * expected.seconds)
        uneven = schedules.simulate(schedule, {**times(step, placement), "message": message})
        shares.append((waited[-1] / seconds, expected.bubble, uneven.bubble))
    record(benchmark, waited, simulated, "the simulation")
    measured, planned, known = (float(share) for share in np.median(shares, axis=0))
    middle = min(range(len(steps)), key=lambda i: abs(shares[i][0] - measured))
    plan = schedules.simulate(schedule, {**mean_times(steps[middle], placement), "message": message})
    benchmark.extra_info |= {
        "label": name,
        "ranks": RANKS,
        "schedule": name,
        "bubble": {"simulated": planned, "measured": measured},
        "timeline": {"simulated": timeline(plan.timeline), "measured": timeline(steps[middle])},
        "note": f"bubble {measured:.1%}; simulated {planned:.1%} from mean times, {known:.1%} from each "
        f"pass's own, with messages of {message * 1e3:.2f} ms",
    }
    if name in NAMES:
        benchmark.extra_info["goal"] = {"of": "ratio", "below": 1.15}
