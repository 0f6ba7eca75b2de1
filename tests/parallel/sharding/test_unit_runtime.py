"""Units in passes of all kinds: called again and again, fed with parameters, gone through backward twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.parallel.sharding import collective_order, units
from tests.helpers import contract
from tests.helpers.clocks import HANG
from tests.parallel.sharding import test_data_parallel as others

Clusters = Callable[[int], md.Cluster]
vectors = others.vectors


class Repeating(nn.Module):
    """A layer called `calls` times, with a residual around each call, and perhaps another one between."""

    def __init__(self, seed: int, calls: int, between: bool = False, embed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.calls, self.between = calls, between
        self.embed = nn.Linear(6, 6) if embed else nn.Identity()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(self.calls):
            x = x + torch.tanh(self.layers[0](x))
            if self.between:
                x = torch.tanh(self.layers[1](x))
        out: Tensor = self.head(torch.tanh(self.layers[1](x)))
        return out


def repeating(**options: Any) -> contract.Case:
    return contract.Case(others.doubled(partial(Repeating, **options)), vectors, batches=(6, 7, 5))


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize(("calls", "between"), [(2, True), (3, False), (4, True)])
def test_a_unit_may_be_called_again(cluster_of: Clusters, calls: int, between: bool, prefetch: bool) -> None:
    for embed in (True, False):  # without, the first call has no input that gets a gradient
        case = repeating(calls=calls, between=between, embed=embed)
        contract.check(cluster_of(2), case, md.Layout(dp=2, zero=3), fully_shard={"prefetch": prefetch})


def test_a_unit_may_be_called_more_often_in_a_later_pass(cluster_of: Clusters) -> None:
    case = repeating(calls=1, between=True)

    def loop(model: Any, step: Callable[[], object], zero: Callable[[], object]) -> None:
        inner = getattr(model, "module", model)
        size, rank = (md.size(), md.rank()) if inner is not model else (1, 0)
        for inner.calls, (x, y) in zip((1, 3, 2, 4), case.global_batches() * 2, strict=False):
            zero()
            x, y = x[:4], y[:4]
            case.loss(model(x[rank::size]), y[rank::size]).backward()  # type: ignore[no-untyped-call]
            step()

    def train() -> dict[str, Tensor]:
        sharded = md.FullyShard(case.model(md.rank()), torch.optim.SGD, lr=0.1)
        loop(sharded, sharded.step, sharded.zero_grad)
        return sharded.state_dict()

    model = case.model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop(model, lambda: optimizer.step(), optimizer.zero_grad)
    for state in cluster_of(2).run(train):
        equal(state, model.state_dict())


def test_ranks_that_call_other_units_hear_of_it(cluster_of: Clusters) -> None:
    def call() -> str:
        class Either(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

            def forward(self, x: Tensor) -> Tensor:
                for layer in (*self.layers, self.layers[md.rank()]):
                    x = layer(x)
                return x

        sharded = md.FullyShard(Either(), torch.optim.SGD, lr=0.1)
        try:
            sharded(torch.ones(1, 2))
        except RuntimeError as error:
            return str(error)
        return "nothing"

    for rank, said in enumerate(cluster_of(2).run(call)):
        assert said.startswith(
            f"the unit layers.{rank} was called 2 times in one pass, and not so on all ranks"
        )


def test_a_rank_that_calls_a_unit_again_alone_hears_of_it() -> None:
    def call() -> str:
        sharded = md.FullyShard(Repeating(0, 1 + md.rank()), torch.optim.SGD, lr=0.1)
        try:
            sharded(torch.ones(1, 6))
        except RuntimeError as error:
            return str(error)
        return "nothing"

    with md.Cluster(2, timeout=HANG) as cluster:
        said = cluster.run(call)
    assert (
        "the unit layers.0 was called 2 times in one pass, and not so on all ranks at this point" in said[1]
    )
    assert said[0] != "nothing"


class Experts(nn.Module):
    """Each row goes to one of four experts, which a gate chooses that is listed after them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)) for _ in range(4))
        self.gate = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.gate(x).softmax(-1).max(-1)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):  # a rank calls the experts of its own rows alone
                x = x.index_add(0, rows, gates[rows, None] * torch.tanh(expert(x[rows])))
        return x


def mixture(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 6), Experts(), Experts(), nn.Linear(6, 3))


@pytest.mark.parametrize(("micro_batches", "recompute"), [(1, True), (2, False)])
def test_ranks_may_call_other_experts_in_each_pass(
    cluster_of: Clusters, micro_batches: int, recompute: bool
) -> None:
    case = contract.Case(others.doubled(mixture), vectors, batches=(2, 9, 4, 7))
    layout = md.Layout(dp=2, zero=3, micro_batches=micro_batches, recompute=recompute)
    for prefetch in (True, False):
        contract.check(cluster_of(2), case, layout, fully_shard={"prefetch": prefetch})


def test_the_order_keeps_to_all_ranks_and_puts_units_that_nobody_called_next_to_their_siblings() -> None:
    names = ["", *(f"{i}.experts.{j}" for i in (0, 1) for j in range(3)), "1.gate"]
    listed = [units.Unit(name, nn.Identity(), number) for number, name in enumerate(names)]
    begun = [[0, 2, 7, 6], [0, 3, 7, 6]]  # by each rank, in this order; nobody has called 1, 4 and 5
    orders = {(0, *(event for n in rank[1:] for event in (2 * n, 2 * n + 1)), 1) for rank in begun}
    merged = collective_order._merged(orders, listed)
    assert [event // 2 for event in merged if event % 2 == 0] == [0, 1, 2, 3, 7, 4, 5, 6]


class Attending(nn.Module):
    """A block with two inputs, which uses the second before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.memory = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        seen = torch.tanh(self.memory(memory))
        return torch.tanh(self.query(query)) + seen


class Learned(nn.Module):
    """Blocks whose first inputs are parameters; one parameter goes into two blocks, and one into a tuple."""

    def __init__(self, seed: int, named: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.named = named
        self.queries, self.more = nn.Parameter(torch.randn(1, 6)), nn.Parameter(torch.randn(1, 6))
        self.embed = nn.Linear(6, 6)
        self.layers = nn.ModuleList([Attending(), Attending(), Pair()])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.embed(x)
        first, second, pair = self.layers
        q = first(query=self.queries, memory=memory) if self.named else first(self.queries, memory)
        q = q + second(self.queries, q)
        out: Tensor = self.head(pair((self.more, q)))
        return out


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = self.inner(pair[0]) * torch.tanh(self.inner(pair[1]))
        return out


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_unit_may_take_parameters(cluster_of: Clusters, ranks: int, prefetch: bool) -> None:
    for named in (False, True):
        case = contract.Case(others.doubled(partial(Learned, named=named)), vectors, batches=(6, 7, 5))
        contract.check(
            cluster_of(ranks), case, md.Layout(dp=ranks, zero=3), fully_shard={"prefetch": prefetch}
        )


class Changing(nn.Module):
    """Blocks that write to their input, and to a list that they get."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList([Writing(), Writing()])

    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.embed(x), []
        for layer in self.layers:
            x = layer(x, seen)
        out: Tensor = self.head(x + sum(seen))
        return out


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        x += torch.tanh(self.inner(x.clone()))
        seen.append(torch.sin(x))
        return x * 1.5


def test_a_unit_may_write_to_its_input(cluster_of: Clusters) -> None:
    case = contract.Case(others.doubled(Changing), vectors, batches=(6, 7, 5))
    contract.check(cluster_of(2), case, md.Layout(dp=2, zero=3))


class Handing(nn.Module):
    """Blocks that hand an input on, which they get by its name; one is also called without gradients."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers, self.head = nn.ModuleList([Handed(), Handed()]), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            seen, _ = self.layers[0](x=x)
        x, seen = self.layers[0](x=x, handed=seen)
        x, seen = self.layers[1](x=x, handed=x)
        out: Tensor = self.head(x + seen)
        return out


class Handed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor, handed: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return x + torch.tanh(self.inner(x)), handed


def test_a_unit_may_hand_an_input_on(cluster_of: Clusters) -> None:
    case = contract.Case(others.doubled(Handing), vectors, batches=(6, 7, 5))
    for prefetch in (False, True):
        contract.check(cluster_of(2), case, md.Layout(dp=2, zero=3), fully_shard={"prefetch": prefetch})


# Several backward passes.


class Two(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layers(x)
        return self.first(x), self.second(x)


@pytest.mark.parametrize("prefetch", [True, False])
def test_backward_may_go_through_a_pass_twice(cluster_of: Clusters, prefetch: bool) -> None:
    x, y = vectors(torch.Generator().manual_seed(1), 8)
    loss = nn.functional.cross_entropy

    def loop(model: Any, size: int, rank: int) -> Iterator[None]:
        for _ in range(3):
            first, second = model(x[rank::size])
            loss(first, y[rank::size]).backward(retain_graph=True)
            loss(second, y[rank::size]).backward(retain_graph=True)
            (2 * loss(first, y[rank::size])).backward()
            yield

    def train() -> dict[str, Tensor]:
        model = Two(md.rank()).double()
        sharded = md.FullyShard(model, torch.optim.SGD, lr=0.1, prefetch=prefetch)
        for _ in loop(sharded, md.size(), md.rank()):
            sharded.step()
            sharded.zero_grad()
        return sharded.state_dict()

    model = Two(0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in loop(model, 1, 0):
        optimizer.step()
        optimizer.zero_grad()
    for state in cluster_of(2).run(train):
        equal(state, model.state_dict())


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.table, self.table[:2]  # a view


class Quantizer(nn.Module):
    """It returns parameters of its own and a view of a layer's, which a loss reads after the pass."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers, self.scale = nn.ModuleList([Codes()]), nn.Parameter(torch.ones(1))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x, codes = self.layers[0](x)
        return {"y": self.head(x), "codes": codes, "scale": self.scale, "head": self.head.weight.T}


def test_a_model_may_return_parameters_and_views_of_them(cluster_of: Clusters) -> None:
    x, _ = vectors(torch.Generator(), 6)

    def total(model: Any) -> Tensor:
        found: Tensor = sum(each.square().mean() for each in model(x).values())
        return found

    def train() -> tuple[float, float, dict[str, Tensor]]:
        sharded = md.FullyShard(Quantizer(md.rank()).double(), torch.optim.SGD, lr=0.1)
        loss = total(sharded)
        loss.backward()  # type: ignore[no-untyped-call]
        sharded.step()
        with torch.no_grad():
            return loss.item(), total(sharded).item(), sharded.state_dict()

    model = Quantizer(0).double()
    loss = total(model)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for trained, evaluated, state in cluster_of(2).run(train):
        assert trained == pytest.approx(loss.item(), abs=1e-10)
        assert evaluated == pytest.approx(total(model).item(), abs=1e-10)
        equal(state, model.state_dict())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_recorded_backward_pass_holds_what_it_gathers(accumulates: bool) -> None:
    """Until the pass through it has ended. Gradients of parameters that it brings itself count, too."""

    def train(model: nn.Module) -> None:
        x = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
        first, _ = model(x)
        slope: Tensor | None = None
        if accumulates:
            first.sum().backward(create_graph=True)
            slope = x.grad
        else:
            (slope,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        assert slope is not None
        assert not isinstance(model, md.FullyShard) or any(unit.held for unit in model.shared.units)
        slope.square().sum().backward()

    plain = Two(0).double()
    train(plain)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    sharded = md.FullyShard(Two(0).double(), torch.optim.SGD, lr=0.1)
    train(sharded)
    sharded.step()
    assert not any(unit.held or unit.present for unit in sharded.shared.units)
    with sharded.summon() as module:
        equal(module.state_dict(), plain.state_dict())


def test_backward_after_the_step_is_refused() -> None:
    sharded = md.FullyShard(Two(0), torch.optim.SGD, lr=0.1)
    first, second = sharded(torch.ones(2, 6))
    first.sum().backward(retain_graph=True)
    sharded.step()
    with pytest.raises(
        RuntimeError, match=r"from before the optimizer's last step.*backward\(\) before step"
    ):
        second.sum().backward()


# Planted faults.


def at_the_first_call(patch: pytest.MonkeyPatch) -> None:
    """A unit is reduced when the backward pass has left one of its calls."""
    patch.setattr(units.UnitPass, "is_over", lambda self, unit: bool(self._left.get(unit)))


def at_the_parameter(patch: pytest.MonkeyPatch) -> None:
    """The gradient of a parameter that a unit takes says that the unit's backward pass is over."""
    patch.setattr(units.Tensor, "view_as", lambda self, _: self)


@pytest.mark.parametrize("fault", [at_the_first_call, at_the_parameter])
def test_the_contract_catches_a_planted_fault(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    model = others.doubled(Learned) if fault is at_the_parameter else repeating(calls=3).model
    case = replace(repeating(calls=3), model=model)
    expected = contract.train_in_one_process(case)
    contract.compare(contract.train_on_this_rank(case, md.Layout(zero=3)), expected)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises((AssertionError, RuntimeError)):
            contract.compare(contract.train_on_this_rank(case, md.Layout(zero=3)), expected)


def equal(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=contract.TOLERANCE, atol=contract.TOLERANCE)
