"""A training step whose matrices two ranks share, in turns with torch's `parallelize_module`.

A byte GPT of 3 M parameters; both ranks have the same rows. At 1 row the messages dominate, at 8 rows the
arithmetic. The peer is the faster of two forms of torch's (harness/steps/tensor_steps.py). All train the same
model on the same rows, in the same ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from minidist.benchmarks.harness.steps.tensor_steps import OURS, PEERS, Timed, time_in_ranks
from minidist.benchmarks.harness.strategy_table.strategy_rounds import Worlds
from minidist.benchmarks.harness.turns import Benchmark, compared, record

pytestmark = pytest.mark.no_finding

GROUP = "Tensor parallel: a byte GPT of 3 M parameters on 2 ranks, {} of 128"
GOALS = {1: 0.50, 8: 0.70}
"""Goals for the ratio to torch's step, by rows."""
Measure = Callable[[int], list[Timed]]


@pytest.fixture(scope="module")
def timed(full: bool, worlds: Worlds) -> Measure:
    """Every form in turns, once for each number of rows."""

    @cache
    def measure(rows: int) -> list[Timed]:
        rounds = (40 if full else 10) if rows == 1 else (15 if full else 6)
        return worlds(2).run(time_in_ranks, rows, rounds)

    return measure


def _enter(benchmark: Benchmark, measure: Measure, rows: int, name: str) -> None:
    ranks = measure(rows)
    for peer in PEERS:  # the comparison means nothing unless both trained the same
        np.testing.assert_allclose(ranks[0].losses[name][:3], ranks[0].losses[peer][:3], rtol=1e-3)
    seconds = {
        of: [max(step) for step in zip(*(rank.seconds[of] for rank in ranks), strict=True)]
        for of in (name, *PEERS)
    }
    peer = min(PEERS, key=lambda of: float(np.median(seconds[of])))
    record(benchmark, seconds[name], seconds[peer], peer)
    extra = benchmark.extra_info
    extra |= {"label": name, "ranks": len(ranks), "rows_per_s": rows / float(np.median(seconds[name]))}
    extra["bytes_per_step"] = max(rank.bytes_per_step[name] for rank in ranks)
    extra["comm_overlap"] = min(rank.comm_overlap[name] for rank in ranks)
    if name == "tensor parallel":
        extra["goal"] = {"of": "ratio", "below": GOALS[rows]}


@compared(GROUP.format("1 row"))
@pytest.mark.parametrize("name", OURS)
def test_tensor_parallel(benchmark: Benchmark, timed: Any, name: str) -> None:
    """Little arithmetic and 18 messages of 128 KB."""
    _enter(benchmark, timed, 1, name)


@compared(GROUP.format("8 rows"))
@pytest.mark.full_only
@pytest.mark.parametrize("name", OURS)
def test_tensor_parallel_with_more_arithmetic(benchmark: Benchmark, timed: Any, name: str) -> None:
    """As many messages, of 1 MB, and eight times the arithmetic."""
    _enter(benchmark, timed, 8, name)
