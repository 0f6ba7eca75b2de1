"""A training step with each of ZeRO's stages, in turns with the loop that torch's users write for it.

A byte GPT of 3 M parameters on two ranks. At 1 row a rank, communication and the optimizer dominate; at 8
rows, arithmetic. All train the same model on the same rows, in the same ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from minidist.benchmarks.harness.steps.sharded_steps import ENTRIES, time_entries
from minidist.benchmarks.harness.steps.training_steps import Case, Timed
from minidist.benchmarks.harness.strategy_table.strategy_rounds import Worlds
from minidist.benchmarks.harness.turns import Benchmark, compared, record

pytestmark = pytest.mark.no_finding

GROUP = "ZeRO: a byte GPT of 3 M parameters on 2 ranks, {} of 128 a rank"
GOALS = {(1, "stage 1"): 0.80, (8, "stage 1"): 1.00, (1, "stage 2"): 0.90, (8, "stage 2"): 0.90}
"""Goals for the ratio to torch's loop, by rows a rank and stage."""
Measure = Callable[[int], list[dict[str, Timed]]]


@pytest.fixture(scope="module")
def timed(full: bool, worlds: Worlds) -> Measure:
    """Every stage and its peer in turns, once for each number of rows a rank."""

    @cache
    def measure(rows: int) -> list[dict[str, Timed]]:
        rounds = (60 if full else 10) if rows == 1 else 15
        return worlds(2).run(time_entries, Case("byte-small", rows=2 * rows), [*ENTRIES], rounds)

    return measure


def _enter(benchmark: Benchmark, measure: Measure, rows: int, name: str) -> None:
    ranks = [rank[name] for rank in measure(rows)]
    np.testing.assert_allclose(  # the comparison means nothing unless both trained the same
        ranks[0].our_losses[:3], np.mean([rank.peer_losses[:3] for rank in ranks], axis=0), rtol=1e-3
    )
    ours, peer = (
        [max(step) for step in zip(*(getattr(rank, of) for rank in ranks), strict=True)]
        for of in ("ours", "peer")
    )
    record(benchmark, ours, peer, ENTRIES[name].peer)
    extra = benchmark.extra_info
    extra |= {"label": name, "ranks": len(ranks), "rows_per_s": 2 * rows / float(np.median(ours))}
    extra["bytes_per_step"] = max(rank.bytes_per_step for rank in ranks)
    extra["comm_overlap"] = min(rank.comm_overlap for rank in ranks)
    extra["goal"] = {"of": "ratio", "below": GOALS[rows, name]}


@compared(GROUP.format("1 row"))
@pytest.mark.parametrize("name", ENTRIES)
def test_zero(benchmark: Benchmark, timed: Any, name: str) -> None:
    """Little arithmetic, with 13 MB of gradients and as many of parameters."""
    _enter(benchmark, timed, 1, name)


@compared(GROUP.format("8 rows"))
@pytest.mark.full_only
@pytest.mark.parametrize("name", ENTRIES)
def test_zero_with_more_arithmetic(benchmark: Benchmark, timed: Any, name: str) -> None:
    """The same messages with eight times the arithmetic."""
    _enter(benchmark, timed, 8, name)
