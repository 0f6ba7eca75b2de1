"""A training step of ZeRO stage 3, where parameters, gradients and optimizer state are sharded, on two ranks.

The peer is `torch.distributed.fsdp.fully_shard` over gloo, on the same units: each block of a GPT, and the
rest. Both train in the same ranks, in turns. The row with offload shows what it costs to keep the shards and
the optimizer's state in mapped files; the row below it is the same step without offload.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import minidist as md
from minidist import comm
from minidist.benchmarks.harness.steps.sharded_steps import fully_sharded
from minidist.benchmarks.harness.steps.training_steps import ADAMW, Case, Timed, plain_loop
from minidist.benchmarks.harness.strategy_table.strategy_rounds import Worlds
from minidist.benchmarks.harness.turns import Benchmark, compared, record
from minidist.kernels.measure.harness import time_in_turns

pytestmark = pytest.mark.no_finding

AT = "ZeRO stage 3: a byte GPT of 3 M parameters on 2 ranks, {} of 128 a rank"
FORMS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "with prefetch": {"prefetch": True},
    "offload to disk": {"offload": True},
}
GOAL = 0.85
"""Goals for the ratio to torch's fully_shard."""


def time_sharded(case: Case, rounds: int) -> dict[str, Timed]:
    """Train on a rank, in turns in every form and with torch's fully_shard."""
    batches = case.batches(rounds + 2)  # one more for time_in_turns to warm up, and one for the ledger
    with tempfile.TemporaryDirectory() as directory:
        return _time(case, batches, rounds, directory)


def _time(case: Case, batches: list[tuple[Tensor, Tensor]], rounds: int, directory: str) -> dict[str, Timed]:
    sharded = {}
    for name, options in FORMS.items():
        options = {**options, "offload": directory} if "offload" in options else options
        sharded[name] = md.FullyShard(case.build(), ADAMW, **options)
    losses: dict[str, list[float]] = {name: [] for name in (*sharded, "")}

    def step(name: str, train: Callable[[Tensor, Tensor], float]) -> Callable[[], None]:
        return lambda: losses[name].append(train(*batches[len(losses[name])]))

    trains = {name: plain_loop(each, each) for name, each in sharded.items()}
    programs = {name: step(name, train) for name, train in trains.items()}
    seconds = time_in_turns({**programs, "": step("", fully_sharded(case.build()))}, rounds)
    timed = {}
    for name, train in trains.items():
        with comm.ledger() as ledger:
            train(*batches[-1])
        timed[name] = Timed(
            seconds[name], seconds[""], losses[name], losses[""], ledger.bytes_sent, ledger.comm_overlap
        )
    return timed


@pytest.fixture(scope="module")
def sharded_timed(full: bool, worlds: Worlds) -> Callable[[int], list[dict[str, Timed]]]:
    """Every form and the peer in turns, once for each number of rows a rank."""

    @cache
    def measure(rows: int) -> list[dict[str, Timed]]:
        rounds = (60 if full else 10) if rows == 1 else 15
        return worlds(2).run(time_sharded, Case("byte-small", rows=2 * rows), rounds)

    return measure


def _enter(benchmark: Benchmark, timed: list[Timed], form: str, rows: int) -> None:
    # The comparison means nothing unless both trained the same model on the same rows.
    for rank in timed:
        np.testing.assert_allclose(rank.our_losses[:3], rank.peer_losses[:3], rtol=1e-3)
    ours = [max(step) for step in zip(*(rank.ours for rank in timed), strict=True)]
    peer = [max(step) for step in zip(*(rank.peer for rank in timed), strict=True)]
    record(benchmark, ours, peer, "torch fully_shard")
    extra = benchmark.extra_info
    extra |= {"label": form, "ranks": 2, "rows_per_s": 2 * rows / float(np.median(ours))}
    extra["bytes_per_step"] = max(rank.bytes_per_step for rank in timed)
    extra["comm_overlap"] = min(rank.comm_overlap for rank in timed)
    if form == "stage 3":
        extra["goal"] = {"of": "ratio", "below": GOAL}


@compared(AT.format("1 row"))
@pytest.mark.parametrize("form", FORMS)
def test_sharded(benchmark: Benchmark, sharded_timed: Any, form: str) -> None:
    """Little arithmetic, and 13 MB of parameters to gather twice."""
    _enter(benchmark, [rank[form] for rank in sharded_timed(1)], form, 1)


@compared(AT.format("8 rows"))
@pytest.mark.full_only
@pytest.mark.parametrize("form", FORMS)
def test_sharded_with_more_arithmetic(benchmark: Benchmark, sharded_timed: Any, form: str) -> None:
    """The same bytes with eight times the arithmetic."""
    _enter(benchmark, [rank[form] for rank in sharded_timed(8)], form, 8)
