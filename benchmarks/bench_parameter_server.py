"""The gain of asynchrony: time to 95% accuracy on digits, also with a worker slowed on purpose.

One server and three workers train an MLP until a worker pulls parameters that classify 95% of the test digits
correctly. Asynchronous (no bound on staleness) and synchronous (bound 0) training take turns in the same
ranks, from the same weights, with the same rows for each worker's step. An asynchronous update uses one
worker's 32 rows and a synchronous one all 96, so asynchrony needs more updates: that is the price of not
waiting. When a worker sleeps in each step, the synchronous server waits for it every time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch

import minidist as md
from minidist import comm
from minidist.benchmarks.harness.turns import Benchmark, compared, measure_pair, record
from minidist.model.data import dataset
from minidist.model.loss import accuracy, cross_entropy
from minidist.model.mlp import MLP
from minidist.model.sampler import Sampler

pytestmark = pytest.mark.no_finding

GROUP = "Parameter server: to 95% on the digits, 3 workers of 32 rows a step"
RANKS = 4
ROWS = 32
WANTED = 0.95
MOST_STEPS = 2000


@dataclass(frozen=True)
class Run:
    """One training as all ranks saw it."""

    seconds: float  # seconds from the start until the first worker saw the accuracy
    updates: int  # updates that the server had made by then
    staleness: float  # updates between a pull and its push, on average


def train(max_staleness: int | None, pause: float, seed: int) -> tuple[float, int, dict[int, int]]:
    """Run a rank. A worker returns seconds to the accuracy and updates, a server the histogram."""
    data = dataset("digits")
    model = MLP((64, 128, 10), seed=seed)
    server = md.ParameterServer(model, partial(torch.optim.SGD, lr=0.2), max_staleness=max_staleness)
    comm.barrier()
    start = time.perf_counter()
    if server.is_server:
        return float("inf"), 0, server.serve().staleness
    place = {"rank": server.worker, "ranks": server.workers}
    sampler = Sampler(len(data.train), ROWS * server.workers, drop_last=True, seed=seed, **place)
    reached, updates = float("inf"), 0
    for step in range(MOST_STEPS):
        updates = server.pull()
        with torch.no_grad():
            if float(accuracy(model(data.test.inputs), data.test.targets)) >= WANTED:
                reached = time.perf_counter() - start
                break
        inputs, targets = data.train[sampler.share(step)]
        cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        if server.worker == server.workers - 1:
            time.sleep(pause)
        server.push(rows=len(inputs))
    server.done()
    return reached, updates, {}


def run(cluster: md.Cluster, max_staleness: int | None, pause: float, seed: int) -> Run:
    """Train once on all ranks."""
    (_, _, staleness), *workers = cluster.run(train, max_staleness, pause, seed)
    seconds, updates, _ = min(workers)
    if seconds == float("inf"):
        raise RuntimeError(f"no worker saw {WANTED:.0%} within {MOST_STEPS} steps")
    pushes = sum(staleness.values())
    return Run(seconds, updates, sum(each * count for each, count in staleness.items()) / pushes)


@pytest.fixture(scope="module")
def cluster() -> Iterator[md.Cluster]:
    """The ranks of both benchmarks."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install 'minidist[bench]'")
    with md.Cluster(RANKS, timeout=120, threads=1) as cluster:
        yield cluster


@compared(GROUP)
@pytest.mark.parametrize("pause", [0.0, 0.01], ids=["alike", "one-slow"])
def test_asynchronous(benchmark: Benchmark, cluster: md.Cluster, full: bool, pause: float) -> None:
    """One update for each push, in turns with one update for every three."""
    runs: dict[int | None, list[Run]] = {None: [], 0: []}

    def once(max_staleness: int | None) -> float:
        done = runs[max_staleness]
        done.append(run(cluster, max_staleness, pause, seed=len(done)))
        return done[-1].seconds

    seconds = measure_pair(lambda: once(None), lambda: once(0), rounds=15 if full else 3)
    record(benchmark, *seconds, "synchronous")
    ours, peer = (statistics.median(r.updates for r in runs[kind]) for kind in (None, 0))
    stale = statistics.mean(r.staleness for r in runs[None])
    benchmark.extra_info |= {
        "label": f"one worker slower by {pause * 1e3:.0f} ms a step" if pause else "three workers alike",
        "ranks": RANKS,
        "note": f"{ours:.0f} updates, {stale:.1f} stale on average, beside {peer:.0f}",
    }
