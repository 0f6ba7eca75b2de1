"""A training step with each of ZeRO's stages, in turns with the loop that torch's users write for it.

A byte GPT of 3 M parameters on two ranks. At 1 row a rank, communication and the optimizer dominate; at 8
rows, arithmetic. The peer of stages 2 and 3 is `torch.distributed.fsdp.fully_shard` over gloo; for stage 3 on
the same units: each block, and the rest. The row with offload keeps the shards and the optimizer's state
in mapped files. All train the same model on the same rows, in the same ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from minidist.benchmarks.harness.training.rounds import Measured, Worlds, compare_pair, measure
from minidist.benchmarks.harness.training.strategies import Pair, Row
from minidist.benchmarks.harness.training.what_is_trained import Work
from minidist.benchmarks.harness.turns import Benchmark, case, compared

pytestmark = pytest.mark.no_finding

GROUP = "ZeRO: a byte GPT of 3 M parameters on 2 ranks, {} of 128 a rank"


def _stage_3(name: str, **given: Any) -> Pair:
    return Pair(Row(name, "dp=2,zero=3", loop="FullyShard", **given), "torch fully_shard")


PAIRS = {
    "stage 1": Pair(Row("stage 1", "dp=2,zero=1"), "torch ZeroRedundancyOptimizer"),
    "stage 2": Pair(Row("stage 2", "dp=2,zero=2"), "torch fully_shard"),
    "stage 3": _stage_3("stage 3"),
    "stage 3, prefetch": _stage_3("stage 3, prefetch", options={"prefetch": True}),
    "stage 3, offload to disk": _stage_3("stage 3, offload to disk", offload=True),
}
GOALS = {
    **{(1, "stage 1"): 0.80, (8, "stage 1"): 1.00, (1, "stage 2"): 0.90, (8, "stage 2"): 0.90},
    **{(1, "stage 3"): 0.85, (8, "stage 3"): 0.85},
}
"""Goals for the ratio to torch's loop, by rows a rank and stage."""
WORK = {rows: Work("byte-small", 2 * rows, tied=True) for rows in (1, 8)}
"""The work by rows a rank."""


def measured(worlds: Worlds, full: bool, rows: int) -> Measured:
    """Every stage and its peer in turns."""
    return measure(worlds, WORK[rows], [*PAIRS.values()], {1: 60 if full else 10, 8: 15}[rows])


@compared(GROUP)
@pytest.mark.parametrize("rows", [1, case(8, quick=False)])
@pytest.mark.parametrize("name", PAIRS)
def test_zero(benchmark: Benchmark, timed: Any, name: str, rows: int) -> None:
    """13 MB of gradients and as many of parameters, with little arithmetic, or eight times as much."""
    benchmark.group = GROUP.format("1 row" if rows == 1 else f"{rows} rows")
    compare_pair(benchmark, PAIRS[name], WORK[rows], timed(rows), GOALS.get((rows, name)))
