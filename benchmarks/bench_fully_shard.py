"""A training step of ZeRO stage 3, where parameters, gradients and optimizer state are sharded, on two ranks.

The peer is `torch.distributed.fsdp.fully_shard` over gloo, on the same units: each block of a GPT, and the
rest. Both train in the same ranks, in turns. The row with offload shows what it costs to keep the shards and
the optimizer's state in mapped files; the row below it is the same step without offload.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from minidist.benchmarks.harness.training.rounds import Measured, Worlds, compare_pair, measure
from minidist.benchmarks.harness.training.strategies import Pair, Row
from minidist.benchmarks.harness.training.work import Work
from minidist.benchmarks.harness.turns import Benchmark, compared

pytestmark = pytest.mark.no_finding

AT = "ZeRO stage 3: a byte GPT of 3 M parameters on 2 ranks, {} of 128 a rank"
FORMS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "with prefetch": {"options": {"prefetch": True}},
    "offload to disk": {"offload": True},
}
PAIRS = {
    form: Pair(Row(form, "dp=2,zero=3", loop="FullyShard", **given), "torch fully_shard")
    for form, given in FORMS.items()
}
GOAL = 0.85
"""The goal for the ratio of stage 3 to torch's fully_shard."""
WORK = {rows: Work("byte-small", 2 * rows, tied=True) for rows in (1, 8)}
"""The work by rows a rank."""


@pytest.fixture(scope="module")
def timed(full: bool, worlds: Worlds) -> Callable[[int], Measured]:
    """Every form and the peer in turns, once for each number of rows a rank."""
    rounds = {1: 60 if full else 10, 8: 15}
    return cache(lambda rows: measure(worlds, WORK[rows], [*PAIRS.values()], rounds[rows]))


def _enter(benchmark: Benchmark, timed: Any, rows: int, form: str) -> None:
    compare_pair(benchmark, PAIRS[form], WORK[rows], timed(rows))
    if form == "stage 3":
        benchmark.extra_info["goal"] = {"of": "ratio", "below": GOAL}


@compared(AT.format("1 row"))
@pytest.mark.parametrize("form", FORMS)
def test_sharded(benchmark: Benchmark, timed: Any, form: str) -> None:
    """Little arithmetic, and 13 MB of parameters to gather twice."""
    _enter(benchmark, timed, 1, form)


@compared(AT.format("8 rows"))
@pytest.mark.full_only
@pytest.mark.parametrize("form", FORMS)
def test_sharded_with_more_arithmetic(benchmark: Benchmark, timed: Any, form: str) -> None:
    """The same bytes with eight times the arithmetic."""
    _enter(benchmark, timed, 8, form)
