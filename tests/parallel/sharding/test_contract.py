"""Every row of the table is held to one contract: the weights that one process would have reached.

Rows, cases, ranks, micro-batches, buckets, algorithms and optimizers; and mistakes, planted in each row, that
the contract catches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.model.loss import accuracy
from minidist.parallel.flat import gradients
from minidist.parallel.flat.bucket_layout import BucketLayout
from minidist.parallel.flat.gradients import GradientsToAll, GradientsToOwners
from minidist.parallel.flat.values import WholeValues
from minidist.parallel.sharding.optimizer import optimizer_slices
from minidist.parallel.sharding.optimizer.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.sets.parameter_set import ParameterSet
from minidist.parallel.sharding.units import units
from minidist.parallel.sharding.units.sharded_parameters import ShardedParameters
from minidist.parallel.sharding.whole import dealing, reducer
from minidist.parallel.training.elementwise_optimizers import ELEMENTWISE
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.contract import Fault, instead_of, nothing, patched
from tests.helpers.on_ranks import on_ranks
from tests.parallel.sharding.cases import (
    ALL,
    CASES,
    OPTIM,
    OPTIMIZERS,
    SMALL,
    Mixed,
    matrices,
    seeded,
)
from tests.parallel.sharding.optimizer import test_parameter_groups as grouped
from tests.parallel.sharding.units.test_unit_runtime import Learned, made, repeating

FORMS: dict[str, dict[str, Any]] = {
    "naive": {"bucket_mb": 0, "overlap": False},
    "naive, overlapped": {"bucket_mb": 0},
    "buckets": {"overlap": False},
    "overlap": {},
    "small buckets": SMALL,
    "small buckets after backward": {**SMALL, "overlap": False},
    "buffers": {"broadcast_buffers": True},
}


def cases_on_ranks() -> Iterator[tuple[int, str, int]]:
    """Each case on 3 ranks, whose shares are uneven; some also on other numbers of ranks."""
    for zero in range(4):
        names = CASES if zero < 3 else {*ALL} - {"mlp on our matmul"}
        yield from ((zero, name, 3) for name in sorted(names))
        yield from ((zero, name, ranks) for name in ("gpt", "unused") for ranks in (1, 2, 4))
    # Torch does not resize a storage that NumPy has a view of; rungs have one.
    yield from ((3, "mlp on our matmul", 2), (3, "experts", 4), (3, "skipping", 2))


@pytest.mark.parametrize(("zero", "name", "ranks"), [*cases_on_ranks()])
def test_every_parameter_equals_one_process(cluster_of: Clusters, zero: int, name: str, ranks: int) -> None:
    contract.check(cluster_of, ALL[name], md.Layout(dp=ranks, zero=zero))


def micro_batches_in_forms() -> Iterator[tuple[int, int, str, int, dict[str, Any]]]:
    """Rows, ranks, cases, micro-batches, of which there may be more than rows, and options of buckets."""
    yield from ((0, ranks, "gpt", many, {}) for ranks, many in ((1, 3), (2, 2), (2, 3), (2, 50)))
    # Every form on 3 ranks, and the one with most messages on other numbers of ranks.
    for ranks, form in (*((3, form) for form in FORMS.values()), *((ranks, SMALL) for ranks in (1, 2, 4))):
        yield from ((0, ranks, name, 2, form) for name in ("gpt", "unused"))
    for ranks, zero in ((1, 2), (2, 1), (3, 2)):
        yield from ((zero, ranks, name, 2, SMALL) for name in ("gpt", "unused", "adafactor"))
        forms: tuple[dict[str, Any], ...] = ({"bucket_mb": 0}, {"algorithm": "ring"}, {"overlap": False})
        yield from ((zero, ranks, "adafactor", 3, form) for form in forms)
        yield zero, ranks, "adafactor", 50, {}
    for name, many in (("gpt", 2), ("unused", 3), ("unused", 9), ("experts", 2), ("experts", 9)):
        yield 3, 3, name, many, {}


@pytest.mark.parametrize(("zero", "ranks", "name", "many", "form"), [*micro_batches_in_forms()], ids=str)
def test_micro_batches_and_buckets_change_nothing(
    cluster_of: Clusters, zero: int, ranks: int, name: str, many: int, form: dict[str, Any]
) -> None:
    case = replace(ALL[name], batches=(5, 4, 7)) if zero == 3 else ALL[name]
    layout = md.Layout(dp=ranks, zero=zero, micro_batches=many)
    contract.check(cluster_of, case, layout, data_parallel=form)


# Stages 1 and 2 give an optimizer the same slices, or whole parameters to those that look at them.
STAGES = [(1 + number % 2, name) for number, name in enumerate(OPTIMIZERS)]
STAGES += [(2, "SGD"), (1, "Adafactor"), (2, "one's own"), (1, "groups")]
STAGES += [(3, "Adafactor"), (3, "Muon"), (3, "one's own")]


@pytest.mark.parametrize(("zero", "optimizer"), [*STAGES, *((3, kind) for kind in sorted(ELEMENTWISE))])
def test_every_optimizer_equals_one_process(cluster_of: Clusters, zero: int, optimizer: str) -> None:
    if optimizer in ELEMENTWISE and zero == 3:
        kind = partial(getattr(OPTIM, optimizer), lr=0.01)
        case, ranks = replace(CASES["unused"], optimizer=kind, batches=(4, 9, 5)), 2
    else:
        case, ranks = replace(CASES["mlp"], optimizer=OPTIMIZERS[optimizer]), 3
    if optimizer == "Muon":
        case = replace(case, model=seeded(matrices))
    contract.check(cluster_of, case, md.Layout(dp=ranks, zero=zero))


GROUPS = [(1, "unused", 3), (2, "unused", 3), *((3, name, 3) for name in grouped.CASES)]


@pytest.mark.parametrize(("zero", "name", "ranks"), [*GROUPS, (3, "unused", 1), (3, "gpt", 2)])
def test_groups_equal_one_process(cluster_of: Clusters, zero: int, name: str, ranks: int) -> None:
    contract.check(cluster_of, grouped.CASES[name], md.Layout(dp=ranks, zero=zero, micro_batches=2))


@pytest.mark.parametrize(("zero", "name"), [(1, "gpt"), (2, "unused"), (1, "adafactor")])
def test_pieces_of_any_length_are_updated_alike(cluster_of: Clusters, zero: int, name: str) -> None:
    seven_elements = patched(optimizer_slices, "SLICE_BYTES", 7 * 8)
    given = seven_elements, contract.train_on_this_rank, CASES[name], md.Layout(dp=2, zero=zero)
    for trained in cluster_of(2).run(contract.with_fault, *given):
        contract.compare(trained, contract.train_in_one_process(CASES[name]))


ALGORITHMS = [(zero, "gpt", algorithm) for zero in (1, 2) for algorithm in ("torch", "ring")]


@pytest.mark.parametrize(
    ("zero", "name", "algorithm"), [*ALGORITHMS, (3, "gpt", "torch"), (3, "skipping", "torch")]
)
def test_any_algorithm_of_the_collectives_will_do(
    cluster_of: Clusters, zero: int, name: str, algorithm: str
) -> None:
    ranks = 3 if zero < 3 else 2
    layout = md.Layout(dp=ranks, zero=zero)

    def train() -> contract.Trained:
        with comm.using(algorithm):
            return contract.train_on_this_rank(ALL[name], layout)

    for trained in cluster_of(ranks).run(train):
        contract.compare(trained, contract.train_in_one_process(ALL[name]))


@pytest.mark.parametrize("zero", [1, 2])
def test_several_dtypes_no_elements_and_no_dimension(cluster_of: Clusters, zero: int) -> None:
    case = replace(CASES["mlp"], model=seeded(Mixed, None))
    expected = contract.train_in_one_process(case)
    for ranks in (1, 3):
        for trained in cluster_of(ranks).run(
            contract.train_on_this_rank, case, md.Layout(dp=ranks, zero=zero), {}
        ):
            for name, wanted in expected.state.items():  # half of the model rounds to float32
                torch.testing.assert_close(trained.state[name], wanted, rtol=1e-4, atol=1e-5)


# Evaluation, and an engine's micro-batches.


@on_ranks(2, row=[(0, "mlp"), (3, "gpt")])
def test_evaluation_is_the_mean_over_all_rows(row: tuple[int, str]) -> None:
    zero, case = row[0], CASES[row[1]]
    inputs, targets = case.rows(torch.Generator().manual_seed(3), 7)
    model = case.model(md.rank())
    engine = md.prepare(model, case.optimizer, md.Layout(dp=2, zero=zero))
    share = slice(0, 7) if md.rank() == 0 else slice(0, 0)  # a rank may have none
    x, y = inputs[share], targets[share]
    before = engine.full_state_dict()
    results = [engine.evaluate(x, y), engine.evaluate(x, y, accuracy), engine.evaluate(x[:0], y[:0])]
    with torch.inference_mode():
        results.append(engine.evaluate(x, y))
    unchanged = all(torch.equal(before[name], value) for name, value in engine.full_state_dict().items())
    units = engine.strategy.units if zero == 3 else ()
    gathered = sum(bucket.values.flat.untyped_storage().nbytes() for unit in units for bucket in unit.buckets)
    engine.step(inputs, targets)
    outputs = case.model(0)(inputs)
    wanted = float(case.loss(outputs, targets).detach())
    right = float((outputs.argmax(-1) == targets).double().mean())
    assert results == pytest.approx([wanted, right, torch.nan, wanted], rel=1e-12, nan_ok=True)
    assert unchanged
    assert model.training
    assert not gathered


def test_evaluation_drops_nothing_out() -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)).double()
    inputs, targets = CASES["mlp"].rows(torch.Generator().manual_seed(0), 50)
    engine = md.prepare(model, contract.ADAMW)
    assert len({engine.evaluate(inputs, targets) for _ in range(5)}) == 1
    assert model.training


@on_ranks(2)
def test_micro_batches_are_as_many_as_asked() -> None:
    rows: list[int] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        rows.append(len(outputs))
        return nn.functional.cross_entropy(outputs, targets)

    case, layout = CASES["mlp"], md.Layout(dp=md.size(), micro_batches=3)
    engine = md.prepare(case.model(0), case.optimizer, layout, loss=loss, check_loss=False)
    engine.step(*case.rows(torch.Generator().manual_seed(0), 7))
    assert rows == [3, 2, 2]


def test_a_rank_without_rows_is_told(cluster_of: Clusters) -> None:
    def train() -> None:
        engine = md.prepare(CASES["mlp"].model(0), OPTIM.SGD, md.Layout(dp=2))
        rows = md.rank()
        engine.step(torch.zeros(rows, 6, dtype=torch.float64), torch.zeros(rows, dtype=torch.int64))

    with pytest.raises(md.RankError, match="rank 0 of 2 was given no rows; use a global batch of at least"):
        cluster_of(2).run(train)


def test_rows_and_targets_have_to_agree() -> None:
    engine = md.prepare(CASES["mlp"].model(0), OPTIM.SGD)
    with pytest.raises(ValueError, match="inputs have 3 rows and targets 2"):
        engine.step(torch.zeros(3, 6, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))


# Planted faults: of the messages,


@instead_of(GradientsToAll, "_all_reduce")
def without_one_bucket(reduce: Any, self: GradientsToAll) -> Any:
    """A bucket is sent, and what comes back is dropped."""
    if self.flat.numel() == 3:  # the last layer's bias
        yield self.gradient_comm.all_reduce(self.flat.clone())
    else:
        yield from reduce(self)


@instead_of(gradients.comm, "reduce_scatter")
def without_one_reduction(
    reduce: Any, x: Tensor, op: str, algorithm: str, group: Any, out: Tensor, **options: Any
) -> Any:
    """The gradients of one unit stay this rank's own."""
    result = reduce(x, op, algorithm, group, out, **options)
    if x.numel() < 20:  # the last layer
        if options:
            result.wait()
        out.copy_(x.view(2, -1)[md.rank()])
    return result


@instead_of(WholeValues, "gather")
def without_gathering_the_last_bucket(gather: Any, self: WholeValues, blocking: bool = False) -> None:
    if 0 not in self.layout.param_indices:
        gather(self, blocking)


def another_ranks_share(self: BucketLayout) -> slice:
    other = (md.rank() + 1) % md.size()
    return slice(other * self.share, (other + 1) * self.share)


@instead_of(dealing, "agree_on_order")
def another_order_on_one_rank(agree: Any, *arguments: Any) -> Any:
    return agree(*arguments)[:: 1 - 2 * md.rank()]


# Of the sums,


@instead_of(reducer.Reducer, "finish_round")
def mean_of_means(finish: Any, self: reducer.Reducer) -> None:
    """Average over ranks and not over rows: wrong where shares differ in size."""
    for parameter in self.parameters:
        assert parameter.grad is not None
        parameter.grad.mul_(13 / md.size() / (6, 7)[md.rank()])
    finish(self)


# Of the update,


@instead_of(OptimizerSlices, "give_gradients")
def unused_ones_updated(give: Any, self: OptimizerSlices, used: list[float]) -> None:
    give(self, [1.0] * len(used))


@instead_of(ShardedParameters, "sum_over_ranks")
def without_the_ranks_flags(synchronize: Any, self: ShardedParameters, *totals: Any) -> Any:
    """Parameters that no rank used are updated with gradients of zero."""
    self.had_gradient = bytearray(b"\1" * len(self.had_gradient))
    return synchronize(self, *totals)


@instead_of(OptimizerSlices, "add")
def all_in_the_first_group(add: Any, self: OptimizerSlices, buckets: Any, group_of: Any) -> None:
    add(self, buckets, dict.fromkeys(group_of, 0))


# And of units.


@instead_of(units.Unit, "free")
def stale_parameters(free: Any, self: units.Unit, held: bool = False) -> None:
    """What was gathered for the backward pass serves the next step, too."""
    if not self.name.endswith("1"):
        free(self, held)


@dataclass(frozen=True)
class Where:
    """Where a fault shows, and what says so."""

    zero: int
    case: contract.Case = CASES["mlp"]
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    ranks: int = 2
    says: str = "not close"


def always(value: Any) -> property:
    """An attribute that nobody can change."""
    return property(lambda _: value, nothing)


SHARE = property(another_ranks_share, nothing)
NO_BROADCAST = patched(comm, "broadcast", lambda x, **_: x)
# Gradients that no hook has moved into their buckets are not moved at all.
NOT_FILLED = patched(reducer.Reducer, "_fill_missing", nothing)
# Each round begins the sums anew.
LAST_ROUND = patched(GradientsToOwners, "begun", always(False))
# A unit is reduced when the backward pass has left one of its calls.
FIRST_CALL = patched(units.UnitPass, "is_over", lambda self, unit: bool(self._left.get(unit)))
# The gradient of a parameter that a unit takes says that the unit's backward pass is over.
AT_PARAMETER = patched(units.Tensor, "view_as", lambda self, _: self)
FAULTS: list[tuple[Fault, Where]] = [
    (NO_BROADCAST, Where(0)),
    (NO_BROADCAST, Where(3)),
    (without_one_bucket, Where(0, options={"bucket_mb": 0})),
    (without_one_reduction, Where(3)),
    (without_gathering_the_last_bucket, Where(2, options=SMALL)),
    (patched(BucketLayout, "own_range", SHARE, raising=False), Where(2, options=SMALL)),
    (another_order_on_one_rank, Where(0)),
    (mean_of_means, Where(0, options={"overlap": False})),
    (patched(ParameterSet, "op", always("mean"), raising=False), Where(2, options=SMALL)),
    (NOT_FILLED, Where(0, options={"overlap": False})),
    (LAST_ROUND, Where(2, options=SMALL, micro_batches=2)),
    (unused_ones_updated, Where(2, CASES["unused"], SMALL)),
    (without_the_ranks_flags, Where(3, CASES["unused"])),
    (all_in_the_first_group, Where(3, grouped.GROUPED, ranks=1)),
    (stale_parameters, Where(3)),
    (FIRST_CALL, Where(3, repeating(calls=3), ranks=1, says="after its gradients were reduced")),
    (AT_PARAMETER, Where(3, made(Learned), ranks=1, says="out of bounds for storage of size 0")),
]


@pytest.mark.parametrize(("fault", "where"), FAULTS)
def test_the_contract_catches_a_planted_fault(cluster_of: Clusters, fault: Fault, where: Where) -> None:
    case = replace(where.case, batches=(13, 13, 13))
    layout = md.Layout(dp=where.ranks, zero=where.zero, micro_batches=where.micro_batches)
    options = {"data_parallel": where.options}
    contract.check(cluster_of, case, layout, **options)
    given = contract.with_fault, fault, contract.train_on_this_rank, case, layout, options
    with pytest.raises((AssertionError, md.RankError), match=where.says):
        contract.compare(cluster_of(where.ranks).run(*given)[-1], contract.train_in_one_process(case))
