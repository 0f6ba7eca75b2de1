"""Units in passes of all kinds: called again and again, fed with parameters, gone through backward twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import minidist as md
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.clocks import HANG
from tests.helpers.refusals import error_of
from tests.parallel.sharding.cases import SGD, check_loop, mixture, seeded, vectors


class Repeating(nn.Module):
    """A layer called `calls` times, with a residual around each call, and perhaps another one between."""

    def __init__(self, calls: int, between: bool = False, embed: bool = True) -> None:
        super().__init__()
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
        return self.head(torch.tanh(self.layers[1](x)))


class Attending(nn.Module):
    """A block with two inputs, which uses the second before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.memory = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        seen = torch.tanh(self.memory(memory))
        return torch.tanh(self.query(query)) + seen


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)


class Learned(nn.Module):
    """Blocks whose first inputs are parameters; one parameter goes into two blocks, and one into a tuple."""

    def __init__(self, named: bool = False) -> None:
        super().__init__()
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
        return self.head(pair((self.more, q)))


class Pair(Block):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.inner(pair[0]) * torch.tanh(self.inner(pair[1]))


class Changing(nn.Module):
    """Blocks that write to their input, and to a list that they get."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList([Writing(), Writing()])

    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.embed(x), []
        for layer in self.layers:
            x = layer(x, seen)
        return self.head(x + sum(seen))


class Writing(Block):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        x += torch.tanh(self.inner(x.clone()))
        seen.append(torch.sin(x))
        return x * 1.5


class Handing(nn.Module):
    """Blocks that hand an input on, which they get by its name; one is also called without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Handed(), Handed()]), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            seen, _ = self.layers[0](x=x)
        x, seen = self.layers[0](x=x, handed=seen)
        x, seen = self.layers[1](x=x, handed=x)
        return self.head(x + seen)


class Handed(Block):
    def forward(self, x: Tensor, handed: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return x + torch.tanh(self.inner(x)), handed


class Recomputing(nn.Module):
    """Its parts are computed again, in the ranks that train with units."""

    def __init__(self) -> None:
        super().__init__()
        part = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2)]
        self.layers, self.last = nn.ModuleList(part), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.last(x)


def made(build: Callable[[], nn.Module], batches: tuple[int, ...] = (6, 7, 5)) -> contract.Case:
    return contract.Case(seeded(build), vectors, batches=batches)


def repeating(**options: Any) -> contract.Case:
    return made(partial(Repeating, **options))


MIXED = made(mixture, (2, 9, 4, 7))
# Where it is not embedded, the first call has no input that gets a gradient.
TABLE: dict[str, tuple[contract.Case, int, dict[str, Any]]] = {
    **{
        f"called {calls} times{', another between' * between}{', embedded' * embed}": (
            repeating(calls=calls, between=between, embed=embed),
            2,
            {},
        )
        for calls, between in ((2, True), (3, False), (4, True))
        for embed in (True, False)
    },
    "other experts on each rank, recomputed": (MIXED, 2, {"recompute": True}),
    "other experts on each rank": (MIXED, 2, {"micro_batches": 2}),
    **{
        f"takes parameters{' by name' * named}, {n} ranks": (made(partial(Learned, named=named)), n, {})
        for named in (False, True)
        for n in (1, 2, 3)
    },
    "writes to its input": (made(Changing), 2, {}),
    "hands an input on": (made(Handing), 2, {}),
    "computes a part again": (made(Recomputing, (12, 13, 7)), 2, {}),
}


@pytest.mark.parametrize("name", TABLE)
def test_units_in_passes_of_any_kind(cluster_of: Clusters, name: str) -> None:
    case, ranks, options = TABLE[name]
    for prefetch in (True, False):
        layout = md.Layout(dp=ranks, zero=3, **options)
        contract.check(cluster_of, case, layout, fully_shard={"prefetch": prefetch})


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("build", [partial(Repeating, 2), Recomputing])
def test_the_whole_model_is_computed_again(
    cluster_of: Clusters, build: Callable[[], nn.Module], use_reentrant: bool
) -> None:
    """A checkpoint stops its recomputation with an error of its own, at the last tensor that it misses."""

    def loop(model: Any, optimizer: Any, rank: int, size: int) -> list[float]:
        losses = []
        for _ in range(3):
            x = torch.ones(6, 6, dtype=torch.float64, requires_grad=True)
            loss = checkpoint(model, x, use_reentrant=use_reentrant).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    check_loop(cluster_of(2), seeded(build), loop)


def test_a_rank_that_calls_a_unit_again_alone_hears_of_it() -> None:
    def call() -> None:
        md.FullyShard(Repeating(1 + md.rank()), SGD)(torch.ones(1, 6))

    with md.Cluster(2, timeout=HANG) as cluster:
        _, text = cluster.run(error_of, RuntimeError, call)
    assert "unit layers.0 was called 2 times in one pass, and not so on all ranks at this point" in text


# Several backward passes.


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layers(x)
        return self.first(x), self.second(x)


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.table, self.table[:2]  # a view


class Quantizer(nn.Module):
    """It returns parameters of its own and a view of a layer's, which a loss reads after the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = nn.ModuleList([Codes()]), nn.Parameter(torch.ones(1))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x, codes = self.layers[0](x)
        return {"y": self.head(x), "codes": codes, "scale": self.scale, "head": self.head.weight.T}


def test_a_model_may_return_parameters_and_views_of_them(cluster_of: Clusters) -> None:
    x, _ = vectors(torch.Generator(), 6)

    def total(model: Any) -> Tensor:
        return sum(each.square().mean() for each in model(x).values())

    def loop(model: Any, optimizer: Any, rank: int, size: int) -> list[float]:
        loss = total(model)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            return [loss.item(), total(model).item()]

    check_loop(cluster_of(2), seeded(Quantizer), loop)


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

    plain = seeded(Two)(0)
    train(plain)
    SGD(plain.parameters()).step()
    sharded = md.FullyShard(seeded(Two)(0), SGD)
    train(sharded)
    sharded.step()
    assert not any(unit.held or unit.present for unit in sharded.shared.units)
    with sharded.summon() as module:
        contract.compare(contract.Trained([], module.state_dict()), contract.Trained([], plain.state_dict()))


def test_backward_after_the_step_is_refused() -> None:
    sharded = md.FullyShard(Two(), SGD)
    first, second = sharded(torch.ones(2, 6))
    first.sum().backward(retain_graph=True)
    sharded.step()
    with pytest.raises(
        RuntimeError, match=r"from before the optimizer's last step.*backward\(\) before step"
    ):
        second.sum().backward()
