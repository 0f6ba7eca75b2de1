"""A training step through a pipeline of two ranks, in turns with torch's pipelining; and the measured bubble.

A byte GPT of 3 M parameters, 8 micro-batches, gloo. GPipe and 1F1B run in turns with the versions of
`torch.distributed.pipelining`; zero-bubble runs in the same rounds, without a peer. Then the share of a step
in which ranks wait, against the simulation's. The simulation takes the time of a message, and either the mean
time of each kind of pass, as a plan does, or each pass's own time, because ranks also wait for slow passes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from minidist.benchmarks.harness.training import pipelines
from minidist.benchmarks.harness.training.rounds import Job, Measured, Worlds, measure_jobs, require_alike
from minidist.benchmarks.harness.training.what_is_trained import Work
from minidist.benchmarks.harness.turns import Benchmark, compared, record
from minidist.parallel import schedules
from minidist.parallel.contract.schedule_kinds import SCHEDULES

RANKS, WORK = 2, Work("byte-small", rows=16, micro_batches=8, cut_by_time=True)
STEPS = "Pipelines: a byte GPT of 3 M parameters on 2 ranks, 16 rows of 128 in 8 micro-batches"
BUBBLE = "Pipelines: seconds in which ranks wait in a step, beside the simulation"
NAMES = [name for name, kind in SCHEDULES.items() if not kind.chunked]
PEERS = {n: kind.torch_name for n, kind in SCHEDULES.items() if kind.torch_name and not kind.splits_backward}
"""Our schedules that torch's pipelining also has, and its classes. Its zero bubble is another one."""


def measured(worlds: Worlds, full: bool) -> Measured:
    """Every schedule and its peer in turns."""
    jobs = {}
    for name in NAMES:
        jobs[name] = Job(RANKS, WORK, partial(pipelines.pipeline, name))
        if name in PEERS:
            jobs[PEERS[name]] = Job(RANKS, WORK, partial(pipelines.torch_pipeline, name), ours=False)
    return measure_jobs(worlds, jobs, 40 if full else 6)


@compared(STEPS)
@pytest.mark.no_finding
@pytest.mark.parametrize("name", NAMES)
def test_pipeline(benchmark: Benchmark, timed: Any, name: str) -> None:
    """One step: forward, backward, optimizer."""
    found = timed()
    ours = found[name]
    if name in PEERS:
        require_alike(found, name, PEERS[name])
        record(benchmark, ours.seconds, found[PEERS[name]].seconds, f"torch {PEERS[name]}")
        benchmark.extra_info["goal"] = {"of": "ratio", "below": 1.00}
    else:
        record(benchmark, ours.seconds)
    benchmark.extra_info |= {"label": name, **ours.figures(WORK.rows)}


@compared(BUBBLE)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in NAMES else [pytest.mark.no_finding]) for name in SCHEDULES],
)
def test_bubble(benchmark: Benchmark, full: bool, worlds: Worlds, name: str) -> None:
    """The share of time in which ranks wait, and what each rank did when in the median step."""
    message = max(worlds(RANKS).run(pipelines.message_seconds, WORK))
    ranks = worlds(RANKS).run(pipelines.passes, WORK, name, *((30, math.inf) if full else (8, 3.0)))
    chunks = SCHEDULES[name].least_chunks
    schedule = schedules.by_name(name, RANKS, WORK.micro_batches, chunks)
    placement = SCHEDULES[name].placement(RANKS, chunks)
    steps, waited, simulated, shares = [*zip(*ranks, strict=True)], [], [], []
    for step in steps:
        first, last = min(own[0].start for own in step), max(own[-1].end for own in step)
        seconds = RANKS * (last - first)
        waited.append(seconds - sum(each.end - each.start for own in step for each in own))
        expected = schedules.simulate(schedule, {**pipelines.mean_times(step, placement), "message": message})
        simulated.append(expected.bubble * RANKS * expected.seconds)
        uneven = schedules.simulate(schedule, {**pipelines.times(step, placement), "message": message})
        shares.append((waited[-1] / seconds, expected.bubble, uneven.bubble))
    record(benchmark, waited, simulated, "the simulation")
    measured, planned, known = (float(share) for share in np.median(shares, axis=0))
    middle = min(range(len(steps)), key=lambda i: abs(shares[i][0] - measured))
    planned_times = pipelines.mean_times(steps[middle], placement)
    plan = schedules.simulate(schedule, {**planned_times, "message": message})
    drawn = {"simulated": plan.timeline, "measured": steps[middle]}
    benchmark.extra_info |= {
        "label": name,
        "ranks": RANKS,
        "schedule": name,
        "bubble": {"simulated": planned, "measured": measured},
        "timeline": {which: pipelines.timeline(step) for which, step in drawn.items()},
        "note": f"bubble {measured:.1%}; simulated {planned:.1%} from mean times, {known:.1%} from each "
        f"pass's own, with messages of {message * 1e3:.2f} ms",
    }
    if name in NAMES:
        benchmark.extra_info["goal"] = {"of": "ratio", "below": 1.15}
