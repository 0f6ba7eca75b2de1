"""A training step whose matrices two ranks share, in turns with torch's `parallelize_module`.

A byte GPT of 3 M parameters; both ranks have the same rows. At 1 row the messages dominate, at 8 rows the
arithmetic. torch's loop follows its tutorial on tensor parallelism, and comes in two forms: the token table
and the head are whole on every rank, or both are cut by the vocabulary, with `loss_parallel`. The faster one
is the peer. All train the same model on the same rows, in the same ranks.
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from minidist.benchmarks.harness.training.rounds import Measured, Worlds, beside, compare_pair, measure
from minidist.benchmarks.harness.training.strategies import Pair, Row
from minidist.benchmarks.harness.training.what_is_trained import Work
from minidist.benchmarks.harness.turns import Benchmark, case, compared

pytestmark = pytest.mark.no_finding

GROUP = "Tensor parallel: a byte GPT of 3 M parameters on 2 ranks, {} of 128"
OURS = {
    name: Row(name, "tp=2", loop="parallelize", options=options)
    for name, options in {"tensor parallel": {}, "sequence parallel": {"sequence_parallel": True}}.items()
}
PEERS = ("torch parallelize_module", "torch parallelize_module, loss_parallel")
GOALS = {(1, "tensor parallel"): 0.50, (8, "tensor parallel"): 0.70}
"""Goals for the ratio to torch's step, by rows and form."""
WORK = {rows: Work("byte-small", rows, tied=True) for rows in (1, 8)}


def measured(worlds: Worlds, full: bool, rows: int) -> Measured:
    """Every form in turns."""
    everything = [Pair(row, peer) for row in OURS.values() for peer in PEERS]
    return measure(worlds, WORK[rows], everything, {1: 40 if full else 10, 8: 15 if full else 6}[rows])


@compared(GROUP)
@pytest.mark.parametrize("rows", [1, case(8, quick=False)])
@pytest.mark.parametrize("name", OURS)
def test_tensor_parallel(benchmark: Benchmark, timed: Any, name: str, rows: int) -> None:
    """18 messages: of 128 KB with little arithmetic, or of 1 MB with eight times as much."""
    benchmark.group = GROUP.format("1 row" if rows == 1 else f"{rows} rows")
    found = timed(rows)
    several = [Pair(OURS[name], peer) for peer in PEERS]
    fastest = min(several, key=lambda pair: statistics.median(found[beside(pair)].seconds))
    compare_pair(benchmark, fastest, WORK[rows], found, GOALS.get((rows, name)))
