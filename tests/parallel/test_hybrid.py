"""Hybrid sharding and secondary shares: the contract, the bytes, the memory, and planted faults."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.comm.algorithms.formulas import all_reduce_bytes
from minidist.parallel.contract.memory_report import Memory
from minidist.parallel.flat.gradients import Done, GradientComm
from minidist.parallel.sharding.sets.parameter_set import ParameterSet
from minidist.parallel.sharding.units.unit_runtime import UnitRuntime
from minidist.parallel.training import clipping
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.models import tokens
from tests.helpers.refusals import refuses
from tests.parallel.test_layouts import SGD, gpt

PARSE = md.Layout.parse


def partly_frozen(seed: int) -> nn.Module:
    """A tied GPT with a frozen matrix and a frozen vector."""
    model = gpt(seed, layers=2)
    for name in ("layers.1.mlp.up.weight", "layers.2.attention_norm.weight"):
        model.get_parameter(name).requires_grad_(False)
    return model


CASE = contract.Case(partly_frozen, partial(tokens, length=11), SGD, batches=(9, 13), clip_norm=0.5)
"""Batches that 4, 6 and 8 ranks do not divide. Some norms are above the limit."""


# The contract.


def grid() -> Iterator[Any]:
    """Every way to share among some of 4, 6 and 8 ranks; each day those of 4 and 6 whose stage is in turn."""
    numbers = itertools.count()
    for dp, shard in ((4, 2), (4, 4), (6, 2), (6, 3), (8, 2), (8, 4)):
        for zero, again in itertools.product((1, 2, 3), (False, True)):
            number = next(numbers)
            layout = md.Layout(dp, zero=zero, shard=shard, recompute=again, micro_batches=1 + number // 2 % 2)
            turn = number % 6 == (2 * dp + shard) % 6
            daily = (dp < 8 and turn) or (dp, shard, again) == (4, 2, False)
            often = dp < 8 and (again or dp == 4)
            more = [pytest.mark.deep if often or turn else pytest.mark.scale]
            yield pytest.param(layout, id=str(layout), marks=[] if daily else more)


@pytest.mark.parametrize("layout", list(grid()))
def test_hybrid_layouts_train_to_the_weights_of_one_process(cluster_of: Clusters, layout: md.Layout) -> None:
    contract.check(cluster_of, CASE, layout)


def deep(*texts: str) -> list[Any]:
    return [pytest.param(text, marks=[pytest.mark.deep]) for text in texts]


@pytest.mark.parametrize(
    "text",
    [
        "dp=4,zero=1,shard=1",  # copies alone
        "dp=4,tp=2,zero=3,shard=2",
        "dp=4,pp=2,zero=1,shard=2,micro_batches=2",
        "dp=2,cp=2,zero=2,shard=2,micro_batches=2",
        *deep(
            "dp=4,zero=2,shard=1",
            "dp=4,zero=3,shard=1",
            "dp=4,tp=2,zero=2,shard=2,micro_batches=2",
            "dp=2,cp=2,zero=1,shard=2",
            "dp=2,cp=2,zero=3,shard=2",
            "dp=2,cp=2,tp=2,zero=3,shard=2,micro_batches=2",
            "dp=2,cp=2,pp=2,zero=1,shard=2,micro_batches=2",
            "dp=4,pp=2,zero=1,shard=2,micro_batches=4,schedule=interleaved,chunks=2",
        ),
    ],
)
def test_hybrid_sharding_goes_with_the_other_axes(cluster_of: Clusters, text: str) -> None:
    layout = PARSE(text)
    model = partial(gpt, layers=max(2, layout.pp * layout.chunks - 2))
    contract.check(cluster_of, replace(CASE, model=model), layout)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("dp=4,zero=3", 2),
        ("dp=8,zero=3,shard=4,micro_batches=2", 2),
        *(
            pytest.param(*each, marks=[pytest.mark.deep])
            for each in (
                ("dp=4,zero=3,micro_batches=3", 2),
                ("dp=6,zero=3,recompute=true", 3),
                ("dp=8,zero=3", 4),
                ("dp=2,cp=2,zero=3", 2),
                ("dp=4,tp=2,zero=3,micro_batches=2", 2),
            )
        ),
    ],
)
def test_secondary_shares_change_no_weight(cluster_of: Clusters, text: str, ranks: int) -> None:
    contract.check(cluster_of, CASE, text, fully_shard={"secondary": ranks})


# Bytes and memory.


@dataclass(frozen=True)
class Counted:
    """One rank's figures after two steps, and those of a third."""

    memory: Memory
    sent: dict[tuple[int, ...], int]  # bytes by group
    formula: int
    buckets: list[int]  # bytes, padded; in stage 3 the root unit's first
    parameters: int

    @property
    def padded(self) -> int:
        return sum(self.buckets)


def count(layout: md.Layout, options: dict[str, Any] | None = None) -> Counted:
    engine = md.prepare(gpt(md.rank(), layers=2), contract.ADAMW, layout, fully_shard=options)
    inputs, targets = tokens(torch.Generator().manual_seed(engine.data_rank), 4, 8)
    for _ in range(2):
        engine.step(inputs, targets)
    with comm.ledger() as ledger:
        engine.step(inputs, targets)
    sent: Counter[tuple[int, ...]] = Counter()
    for call in ledger.calls:
        sent[call.group] += call.bytes_sent
    strategy: Any = engine.strategy
    formula = strategy.bytes_per_step(layout.micro_batches)
    buckets = [each.layout.length * each.layout.dtype.itemsize for each in strategy.buckets]
    return Counted(engine.memory(), dict(sent), formula, buckets, len(strategy.parameters))


@cache
def counted(cluster_of: Clusters, layout: md.Layout, secondary: int = 0) -> list[Counted]:
    """Each rank's; several tests look at the same."""
    return cluster_of(layout.ranks).run(count, layout, {"secondary": secondary} if secondary else None)


def neighbours(rank: int, ranks: int) -> tuple[int, ...]:
    first = rank // ranks * ranks
    return tuple(range(first, first + ranks))


MORE = [pytest.param(*each, marks=[pytest.mark.deep]) for each in ((6, 3), (8, 2))]


@pytest.mark.parametrize(("dp", "shard"), [(4, 2), *MORE])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_step_sends_what_the_formula_says(cluster_of: Clusters, zero: int, dp: int, shard: int) -> None:
    for rank, found in enumerate(counted(cluster_of, md.Layout(dp, zero=zero, shard=shard))):
        # A reduce-scatter and an all-gather; in stage 3 one more of all units but the root.
        gathered = 2 * found.padded - found.buckets[0] if zero == 3 else found.padded
        copies = tuple(range(rank % shard, dp, shard))
        assert found.sent == {
            neighbours(rank, shard): (shard - 1) * (found.padded + gathered) // shard,
            copies: sum(all_reduce_bytes(bucket // shard, len(copies)) for bucket in found.buckets),
            # On how many ranks each parameter was used, and totals.
            tuple(range(dp)): all_reduce_bytes(8 * (found.parameters + (2 if zero == 3 else 3)), dp),
        }
        assert found.formula == sum(found.sent.values())


@pytest.mark.parametrize(
    ("dp", "shard", "ranks", "micro_batches"),
    [
        (4, 0, 2, 1),
        pytest.param(4, 0, 2, 3, marks=[pytest.mark.deep]),
        pytest.param(6, 0, 3, 2, marks=[pytest.mark.deep]),
        pytest.param(8, 4, 2, 2, marks=[pytest.mark.deep]),
    ],
)
def test_secondary_shares_leave_one_gather_over_all_owners(
    cluster_of: Clusters, dp: int, shard: int, ranks: int, micro_batches: int
) -> None:
    layout, owners = md.Layout(dp, zero=3, shard=shard, micro_batches=micro_batches), shard or dp
    for rank, found in enumerate(counted(cluster_of, layout, ranks)):
        again = (2 * micro_batches - 1) * found.padded - micro_batches * found.buckets[0]
        assert found.sent[neighbours(rank, ranks)] == (ranks - 1) * again // ranks
        rest = (owners - 1) * found.padded * (1 + micro_batches) // owners
        tail = all_reduce_bytes(8 * (found.parameters + 2), dp)
        assert found.sent[neighbours(rank, owners)] == rest + (tail if owners == dp else 0)
        assert found.formula == sum(found.sent.values())


@pytest.mark.parametrize(("dp", "shard"), [(4, 2), *MORE])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_rank_holds_as_much_as_one_of_so_few_ranks(
    cluster_of: Clusters, zero: int, dp: int, shard: int
) -> None:
    found = counted(cluster_of, md.Layout(dp, zero=zero, shard=shard))
    plain = counted(cluster_of, md.Layout(shard, zero=zero))
    elements = sum(parameter.numel() for parameter in gpt(0, layers=2).parameters())
    for rank, each in enumerate(found):
        for part in ("parameters", "gradients", "optimizer"):
            assert getattr(each.memory, part) == getattr(plain[rank % shard].memory, part), part
        # Adam's two moments; the padding of a few units is below a hundredth.
        assert each.memory.optimizer == pytest.approx(2 * 8 * elements / shard, rel=0.01)


def test_secondary_shares_take_an_nth_more(cluster_of: Clusters) -> None:
    plain, found = (counted(cluster_of, md.Layout(4, zero=3), secondary) for secondary in (0, 2))
    for each, without in zip(found, plain, strict=True):
        assert each.memory.parameters - without.memory.parameters == each.padded // 2
        assert each.memory.gradients == without.memory.gradients
        assert each.memory.optimizer == without.memory.optimizer


# Planted faults.


@contract.instead_of(GradientComm, "start")
def without_the_sum_over_the_copies(
    start: Any, self: GradientComm, collective: Any, *arguments: Any, **options: Any
) -> Any:
    over_copies = self.hybrid is not None and arguments[-1] is self.hybrid[1]
    return Done(arguments[0]) if over_copies else start(self, collective, *arguments, **options)


@contract.instead_of(clipping, "global_norm")
def with_every_copys_norm(norm: Any, gradients: Any, sharded: bool, *_: Any) -> Any:
    return norm(gradients, sharded)


@contract.instead_of(UnitRuntime, "changed")
def with_stale_secondary_shares(_: Any, self: UnitRuntime) -> None:
    self.version += 1


with_every_copys_norm_on_a_mesh = contract.patched(ParameterSet, "counts_here", True)


@pytest.mark.parametrize(
    ("fault", "text", "options"),
    [
        (without_the_sum_over_the_copies, "dp=4,zero=1,shard=2", {}),
        (without_the_sum_over_the_copies, "dp=4,zero=3,shard=2", {}),
        (with_every_copys_norm, "dp=4,zero=2,shard=2", {}),
        (with_every_copys_norm_on_a_mesh, "dp=4,tp=2,zero=1,shard=2", {}),
        (with_stale_secondary_shares, "dp=4,zero=3", {"fully_shard": {"secondary": 2}}),
    ],
)
def test_a_planted_fault_is_caught(
    cluster_of: Clusters, fault: contract.Fault, text: str, options: dict[str, Any]
) -> None:
    given = fault, contract.train_on_this_rank, CASE, PARSE(text), options
    for trained in cluster_of(PARSE(text).ranks).run(contract.with_fault, *given):
        with pytest.raises(AssertionError, match="not close"):
            contract.compare(trained, contract.train_in_one_process(CASE))


# Refusals.


test_a_shard_that_fits_no_layout_is_refused = refuses(
    PARSE,
    ("dp=4,shard=2", "shard is 2 with zero=0"),
    ("dp=6,zero=1,shard=4", "shard is 4, which does not divide the 6 ranks of dp=6 and cp=1"),
    ("dp=4,tp=2,zero=1,shard=8", "shard is 8, which does not divide the 4 ranks"),
    ("dp=4,zero=1,shard=-2", "shard is -2, which does not divide"),
)


@pytest.mark.parametrize("secondary", [0, 1, 3, 4, 2.0, True, "2"])
def test_secondary_shares_that_fit_no_layout_are_refused(secondary: object) -> None:
    layout = md.Layout(8, zero=3, shard=4)
    with pytest.raises(ValueError, match="and 4 ranks share the parameters; give"):
        md.prepare(gpt(0, layers=2), SGD, layout, fully_shard={"secondary": secondary})


# What ranks do differently, and what users do between steps.


class Chosen(nn.Module):
    """Vectors of which a pass uses some."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(6, dtype=torch.float64, generator=generator) for _ in range(5)]
        self.vectors = nn.ParameterList([nn.Parameter(vector) for vector in drawn])

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        for number in reversed(chosen):
            x = torch.tanh(x * self.vectors[number])
        return x


def in_copies() -> GradientComm:
    """Groups of two of four ranks."""
    return GradientComm(None, hybrid=comm.Mesh(dp=4).blocks("dp_cp", 2))


def test_ranks_may_use_other_parameters_in_stage_2(cluster_of: Clusters) -> None:
    """A rank whose memory is full waits for a sum over copies that the others must have launched."""

    def train() -> list[Tensor]:
        model = Chosen()
        zero = md.ZeroOptimizer(model.parameters(), torch.optim.SGD, 2, in_copies(), bucket_mb=0, lr=0.1)
        for chosen in ([0, 1, 2, 3, 4], [0, 1, 3, 4] if md.rank() in (0, 3) else [0, 1]):
            model(torch.ones(6, dtype=torch.float64), chosen).sum().backward()
            zero.step()
            zero.zero_grad()
        return [vector.detach().clone() for vector in model.parameters()]

    model = Chosen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for rank in range(4):
            chosen = [0, 1] if step and rank in (1, 2) else [0, 1, 3, 4] if step else [0, 1, 2, 3, 4]
            (model(torch.ones(6, dtype=torch.float64), chosen).sum() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in cluster_of(4).run(train):
        torch.testing.assert_close(found, [vector.detach() for vector in model.parameters()])


def test_the_state_of_a_copy_is_consolidated_once(cluster_of: Clusters) -> None:
    def consolidate() -> list[list[float]] | None:
        model = Chosen()
        zero = md.ZeroOptimizer(model.parameters(), torch.optim.SGD, 1, in_copies(), lr=0.1, momentum=0.9)
        model(torch.ones(6, dtype=torch.float64), [0, 1, 2, 3, 4]).sum().backward()
        zero.step()
        zero.consolidate_state_dict(3)
        if md.rank() != 3:
            return None
        return [state["momentum_buffer"].tolist() for state in zero.state_dict()["state"].values()]

    model = Chosen()
    model(torch.ones(6, dtype=torch.float64), [0, 1, 2, 3, 4]).sum().backward()
    *others, found = cluster_of(4).run(consolidate)
    assert others == [None] * 3
    wanted = [vector.grad for vector in model.parameters()]
    torch.testing.assert_close([torch.tensor(each, dtype=torch.float64) for each in found or ()], wanted)


def test_shards_written_by_hand_reach_the_next_pass(cluster_of: Clusters) -> None:
    """An average swapped in for an evaluation and out again, with secondary shares and without."""

    def train(secondary: int | None) -> list[float]:
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).double()
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
        options = {"secondary": secondary} if secondary else None
        layout, loss = md.Layout(dp=4, zero=3), nn.functional.mse_loss
        engine = md.prepare(model, SGD, layout, loss, fully_shard=options)
        x, losses = torch.ones(2, 6, dtype=torch.float64), []
        for _ in range(3):
            losses.append(engine.step(x, x))
            shards = [p for group in engine.optimizer.param_groups for p in group["params"]]
            for factor in (0.5, 2.0):
                with torch.no_grad():
                    torch._foreach_mul_(shards, factor) if shards else None
                if factor < 1:
                    losses.append(engine.evaluate(x, x))
        return losses

    assert cluster_of(4).run(train, 2) == cluster_of(4).run(train, None)


def test_a_unit_may_have_a_parameter_without_elements(cluster_of: Clusters) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.nothing = nn.Linear(4, 4), nn.Parameter(torch.zeros(0, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.nothing.sum()

    def train() -> list[float]:
        torch.manual_seed(0)
        model, x = nn.Sequential(Empty(), Empty()), torch.ones(2, 4)
        layout, loss = md.Layout(dp=4, zero=3), nn.functional.mse_loss
        engine = md.prepare(model, SGD, layout, loss, fully_shard={"secondary": 2})
        return [engine.step(x, x) for _ in range(2)]

    first, second = cluster_of(4).run(train)[0]
    assert second < first
