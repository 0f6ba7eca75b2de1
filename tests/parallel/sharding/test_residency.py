"""The table decides: a step sends and keeps what a row says, and a row that nobody has trains, once added."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import minidist as md
from minidist import comm
from minidist.parallel.sharding import residency
from minidist.parallel.sharding.residency import Residency
from minidist.parallel.sharding.sharded_parameters import ShardedParameters
from tests.helpers import contract
from tests.parallel.sharding.test_data_parallel import CASES, sizes_of

Clusters = Callable[[int], md.Cluster]
F64 = 8


def layout_of(row: int, ranks: int, micro_batches: int) -> md.Layout:
    layout = md.Layout(dp=ranks, micro_batches=micro_batches)
    object.__setattr__(layout, "zero", row)  # `Layout` knows the paper's four alone
    return layout


def add_a_row(patch: pytest.MonkeyPatch) -> None:
    """Shares of the parameters, and whole gradients, which add up on a rank and are sent once."""
    patch.setitem(residency.ROWS, 4, Residency(parameters=False, gradients=True, state=False))


def train(row: int, name: str, ranks: int, micro_batches: int) -> contract.Trained:
    with pytest.MonkeyPatch.context() as patch:
        add_a_row(patch)
        return contract.train_on_this_rank(CASES[name], layout_of(row, ranks, micro_batches))


@pytest.mark.parametrize(("name", "ranks"), [("gpt", 2), ("unused", 3), ("tied", 2), ("frozen", 3)])
def test_a_row_that_nobody_has_trains(cluster_of: Clusters, name: str, ranks: int) -> None:
    for micro_batches in (1, 3):
        for trained in cluster_of(ranks).run(train, 4, name, ranks, micro_batches):
            contract.compare(trained, contract.train_in_one_process(CASES[name]))


def count(row: int, micro_batches: int) -> tuple[int, int, float, list[int], int]:
    """Bytes that a step sends, by the ledger and by two formulas; what is held after it; parameters."""
    with pytest.MonkeyPatch.context() as patch:
        add_a_row(patch)
        model = CASES["gpt"].model(0)
        elements, parameters = sizes_of(model)
        layout = layout_of(row, md.size(), micro_batches)
        engine = md.prepare(model, CASES["gpt"].optimizer, layout, data_parallel=None, rehearse=False)
        inputs, targets = CASES["gpt"].rows(torch.Generator().manual_seed(md.rank()), 6)
        engine.step(inputs, targets)
        with comm.ledger() as ledger:
            engine.step(inputs, targets)
        memory = engine.memory()
        held = [memory.parameters, memory.optimizer]
        told = residency.ROWS[row].bytes_sent(F64 * elements, md.size(), micro_batches)
        return ledger.bytes_sent, engine.strategy.bytes_per_step(micro_batches), told, held, parameters


@pytest.mark.parametrize("row", range(5))
def test_a_step_sends_and_keeps_what_its_row_says(cluster_of: Clusters, row: int) -> None:
    """Up to counts of who used which parameter, padding, and the root unit, which is gathered once a pass."""
    ranks = 2
    elements, _ = sizes_of(CASES["gpt"].model(0))
    for micro_batches in (1, 3):
        for sent, formula, told, held, parameters in cluster_of(ranks).run(count, row, micro_batches):
            assert sent == formula
            counts = 2 * micro_batches * F64 * (parameters + 3)
            spared = 0 if row < 3 else told / 2
            assert told - spared <= sent <= told + counts + 0.01 * told
            with pytest.MonkeyPatch.context() as patch:
                add_a_row(patch)
                whole, _, state = residency.ROWS[row].held(F64 * elements, F64 * elements // ranks)
            assert held[1] == pytest.approx(2 * state, rel=0.02)
            assert held[0] == pytest.approx(whole, rel=0.02) or row > 2


def test_a_row_that_sends_too_often_is_seen(cluster_of: Clusters) -> None:
    """A planted fault: whole gradients that are sent with every micro-batch all the same."""

    def planted() -> tuple[int, int]:
        with pytest.MonkeyPatch.context() as patch:
            keep = property(lambda _: False, lambda *_: None)
            patch.setattr(ShardedParameters, "_accumulates", keep, raising=False)
            sent, formula, *_ = count(4, 3)
            return sent, formula

    for sent, formula in cluster_of(2).run(planted):
        assert sent > formula


def test_whole_state_needs_whole_gradients() -> None:
    with pytest.raises(ValueError, match="whole optimizer state, whose step needs whole parameters and grad"):
        Residency(parameters=True, gradients=False, state=True)
