"""Two sets of parameters in one model, the experts and the rest: each sends and keeps what its row says.

That the sets train to the weights of one process, and what breaks that, is tested with the experts' layouts.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import nn

import minidist as md
from minidist import comm
from minidist.parallel.contract.memory_report import Memory
from minidist.parallel.contract.residency import ROWS, Residency
from minidist.parallel.flat.gradients import GradientComm
from minidist.parallel.sharding.sets.parameter_set import ParameterSet
from minidist.parallel.sharding.whole.whole_parameters import WholeParameters
from tests.conftest import Clusters
from tests.helpers.contract import ADAMW, own_rows
from tests.parallel.experts.test_expert_layouts import CASE, gpt

RANKS, F64 = 4, 8


def step_of(zero: int) -> tuple[int, int, Memory, list[int], list[int]]:
    """Bytes that a step sends, and by the formula; memory; elements and numbers of both sets' parameters."""
    model = gpt(0, balance_rate=0.0)
    engine = md.prepare(model, ADAMW, md.Layout(dp=RANKS, ep=2, zero=zero))
    parts: tuple[list[int], list[int]] = [], []
    for name, parameter in model.named_parameters():
        parts[".experts." in name].append(parameter.numel())
    batch = own_rows(engine, CASE.global_batches()[1])
    engine.step(*batch)  # the ranks agree on the buckets
    with comm.ledger() as exchanged:
        engine.step(*batch)
    sent = sum(call.bytes_sent for call in exchanged.calls if call.name != "all_to_all")
    return sent, engine.strategy.bytes_per_step(), engine.memory(), [*map(sum, parts)], [*map(len, parts)]


@pytest.mark.parametrize("zero", range(3))
def test_each_set_sends_and_keeps_what_its_row_says(cluster_of: Clusters, zero: int) -> None:
    found, row = cluster_of(RANKS).run(step_of, zero), ROWS[zero]
    padding = 20 * F64  # of a bucket
    for sent, formula, memory, (dense, expert), (few, fewer) in found:
        told = row.bytes_sent(F64 * dense, RANKS) + row.bytes_sent(F64 * expert, 2)
        counts = 2 * F64 * (few + 3) + 2 * F64 * (fewer + 3)  # who used which parameter, and totals
        assert told <= formula <= told + counts + 2 * padding
        assert memory.parameters <= F64 * (dense + expert) + padding
        assert sent == formula
    *_, (dense, expert), _ = found[0]
    copies = (RANKS, RANKS) if row.whole_state else (1, 2)  # two pairs
    state = 2 * F64 * (copies[0] * dense + copies[1] * expert)
    assert state <= sum(memory.optimizer for _, _, memory, _, _ in found) <= 1.01 * state


def shared_by(rows: Sequence[Residency]) -> WholeParameters:
    """A model whose parameters are in sets of these rows."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return WholeParameters(model.named_parameters, [ParameterSet(row, GradientComm(None)) for row in rows])


def test_sets_are_whole_together_or_not_at_all() -> None:
    with pytest.raises(ValueError, match="either all sets of parameters are whole between steps, or none"):
        shared_by([ROWS[3], ROWS[1]])


def test_sets_with_two_rows_are_refused() -> None:
    """Both are whole between steps, and only the experts' state would be."""
    with pytest.raises(ValueError, match=r"state=False.*state=True.*: give all sets one row"):
        shared_by([ROWS[1], ROWS[0]])
