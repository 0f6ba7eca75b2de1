"""The table decides: a step sends and keeps what a row says, and a row that nobody has trains, once added."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import minidist as md
from minidist import comm
from minidist.parallel.contract import residency
from minidist.parallel.contract.residency import Residency
from minidist.parallel.sharding.units.sharded_parameters import ShardedParameters
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.on_ranks import on_ranks
from tests.helpers.step_bytes import bytes_of_a_step
from tests.parallel.sharding.cases import ALL, CASES, sizes_of

F64 = 8


def add_a_row(patch: pytest.MonkeyPatch) -> None:
    """Shares of the parameters, and whole gradients, which add up on a rank and are sent once."""
    patch.setitem(residency.ROWS, 4, Residency(parameters=False, gradients=True, state=False))


def train(row: int, name: str, ranks: int, micro_batches: int) -> contract.Trained:
    with pytest.MonkeyPatch.context() as patch:
        add_a_row(patch)
        return contract.train_on_this_rank(
            CASES[name], md.Layout(dp=ranks, zero=row, micro_batches=micro_batches)
        )


@pytest.mark.parametrize(("name", "ranks"), [("gpt", 2), ("unused", 3), ("tied", 2), ("frozen", 3)])
def test_a_row_that_nobody_has_trains(cluster_of: Clusters, name: str, ranks: int) -> None:
    for micro_batches in (1, 3):
        for trained in cluster_of(ranks).run(train, 4, name, ranks, micro_batches):
            contract.compare(trained, contract.train_in_one_process(CASES[name]))


@dataclass(frozen=True)
class Step:
    """What a step sent, what formulas say of it, and what is held after it."""

    sent: int
    formula: int
    once: int  # by the formula, with one micro-batch
    a_round: int  # of gradients, where each micro-batch sends them
    told: float  # by the row alone
    calls: int
    parameters: int
    buckets: list[int]  # their elements, with padding
    held: tuple[int, int]  # bytes of parameters and of optimizer state
    predicted: int  # bytes by the model alone, for data parallelism


def step_of(row: int, name: str = "gpt", micro_batches: int = 1, **options: Any) -> Step:
    with pytest.MonkeyPatch.context() as patch:
        add_a_row(patch)
        case = ALL[name]
        model = case.model(0)
        elements, parameters = sizes_of(model)
        layout = md.Layout(dp=md.size(), zero=row, micro_batches=micro_batches)
        engine = md.prepare(model, case.optimizer, layout, data_parallel=options or None, rehearse=False)
        inputs, targets = case.rows(torch.Generator().manual_seed(md.rank()), 6)
        engine.step(inputs, targets)  # the ranks agree on the buckets, or on the order of units
        with comm.ledger() as ledger:
            engine.step(inputs, targets)
        strategy, memory = engine.strategy, engine.memory()
        return Step(
            ledger.bytes_sent,
            strategy.bytes_per_step(micro_batches),
            strategy.bytes_per_step(),
            strategy.sets[0].bytes_sent(),
            residency.ROWS[row].bytes_sent(F64 * elements, md.size(), micro_batches),
            len(ledger.calls),
            parameters,
            [bucket.layout.length for bucket in strategy.buckets],
            (memory.parameters, memory.optimizer),
            bytes_of_a_step(model, md.size(), options.get("bucket_mb", 25)) if row == 0 else 0,
        )


@pytest.mark.parametrize("row", range(5))
def test_a_step_sends_and_keeps_what_its_row_says(cluster_of: Clusters, row: int) -> None:
    """Up to counts of who used which parameter, padding, and the root unit, which is gathered once a pass."""
    ranks = 2
    elements, _ = sizes_of(CASES["gpt"].model(0))
    for micro_batches in (1, 3):
        for step in cluster_of(ranks).run(step_of, row, "gpt", micro_batches):
            assert step.sent == step.formula
            more = micro_batches - 1 if row == 2 else 0  # it sends the gradients of each micro-batch
            assert step.sent == step.once + more * step.a_round or row > 2
            counts = 2 * micro_batches * F64 * (step.parameters + 3)
            spared = 0 if row < 3 else step.told / 2
            assert step.told - spared <= step.sent <= step.told + counts + 0.01 * step.told
            with pytest.MonkeyPatch.context() as patch:
                add_a_row(patch)
                whole, _, state = residency.ROWS[row].held(F64 * elements, F64 * elements // ranks)
            parameters, optimizer = step.held
            assert optimizer == pytest.approx(2 * state, rel=0.02)
            assert parameters == pytest.approx(whole, rel=0.02) or row > 2


@on_ranks(2)
def test_a_row_that_sends_too_often_is_seen() -> None:
    """A planted fault: whole gradients that are sent with every micro-batch all the same."""
    with pytest.MonkeyPatch.context() as patch:
        keep = property(lambda _: False, lambda *_: None)
        patch.setattr(ShardedParameters, "_accumulates", keep, raising=False)
        step = step_of(4, "gpt", 3)
    assert step.sent > step.formula


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_data_parallelism_sends_what_the_formula_says(cluster_of: Clusters, ranks: int) -> None:
    elements, _ = sizes_of(CASES["gpt"].model(0))
    for bucket_mb, overlap in ((0, False), (0, True), (25, False), (25, True), (0.0003, True)):
        for step in cluster_of(ranks).run(partial(step_of, 0, bucket_mb=bucket_mb, overlap=overlap)):
            assert step.sent == step.formula
            # The exact share, but for less than one byte that each call's division drops.
            whole = 2 * (ranks - 1) / ranks * F64 * (elements + 2 + step.parameters)
            assert whole - step.calls <= step.sent <= whole
            assert abs(step.sent - step.predicted) < max(step.calls, 1)
            if ranks > 1:
                assert step.calls == {0: step.parameters, 25: 1}.get(bucket_mb, step.calls)
                assert bucket_mb != 0.0003 or 1 < step.calls < step.parameters


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_stages_1_and_2_send_as_data_parallelism_does(cluster_of: Clusters, ranks: int, stage: int) -> None:
    elements, _ = sizes_of(CASES["mlp"].model(0))
    for bucket_mb in (0, 0.0003, 25):
        for step in cluster_of(ranks).run(partial(step_of, stage, "mlp", bucket_mb=bucket_mb)):
            assert step.sent == step.formula
            buckets = len(step.buckets)
            totals = 2 * (ranks - 1) * F64 * (step.parameters + 3) // ranks
            padded = range(elements, elements + (ranks - 1) * buckets + 1)
            assert step.sent - totals in {2 * (ranks - 1) * F64 * size // ranks for size in padded}
            assert buckets == {0: step.parameters, 25: 1}.get(bucket_mb, buckets)
            assert bucket_mb != 0.0003 or 1 < buckets < step.parameters


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_stage_3_sends_half_as_much_again_for_each_micro_batch(cluster_of: Clusters, ranks: int) -> None:
    for name, micro_batches in (("untied", 1), ("untied", 3), ("gpt", 2), ("odd", 1), ("experts", 1)):
        for step in cluster_of(ranks).run(step_of, 3, name, micro_batches):
            assert step.sent == step.formula
            used = 2 * (ranks - 1) * F64 * (step.parameters + 2) // ranks
            if name == "untied":
                padded = sum(step.buckets)
                assert step.sent == micro_batches * 3 * (ranks - 1) * padded * F64 // ranks + used


def test_whole_state_needs_whole_gradients() -> None:
    with pytest.raises(ValueError, match="whole optimizer state, whose step needs whole parameters and grad"):
        Residency(parameters=True, gradients=False, state=True)


def test_only_the_table_knows_the_stages_by_number() -> None:
    """Everything else asks the row: a comparison of a stage with a number would be a second table."""
    wrong, right = (ast.parse(text, mode="eval").body for text in ("2 <= zero < 4", "a.zero == b.zero"))
    assert [compares_a_stage(each) for each in (wrong, right)] == [True, False]
    package = Path(md.__file__).parent
    found = {
        f"{file.relative_to(package)}:{node.lineno}"
        for file in package.rglob("*.py")
        if "zero" in file.read_text() or file.parent.name == "sharding"
        if file != Path(residency.__file__)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Compare) and compares_a_stage(node, file.parent.name == "sharding")
    }
    assert found == set()


def compares_a_stage(node: ast.AST, in_sharding: bool = False) -> bool:
    """Whether `zero` is compared with a number or, where no pipeline has stages, `stage`."""
    inside = [*ast.walk(node)]
    names = {each.id for each in inside if isinstance(each, ast.Name)}
    names |= {each.attr for each in inside if isinstance(each, ast.Attribute)}
    numbers = [each for each in inside if isinstance(each, ast.Constant) and type(each.value) is int]
    return bool(numbers and names & ({"zero", "stage"} if in_sharding else {"zero"}))
