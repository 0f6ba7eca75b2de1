"""Losses and models that differentiate: Laplacians, gradient penalties, forces, and torch.func.

The loss of a physics-informed net has derivatives of the outputs with respect to the inputs, so its gradient
has second derivatives of the model. Every layout has to give those of one process, or say that it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.parallel.context_parallel.attention_in_a_ring import ring_attention
from minidist.parallel.sharding.units import unit_runtime
from minidist.parallel.tensor_parallel import linear_layers, operators
from minidist.parallel.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from minidist.parallel.training import batch_norm
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.models import Chain, seeded

# torch.func's own import of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
PARSE = md.Layout.parse
ADAM = partial(torch.optim.Adam, lr=1e-2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.tanh(self.fc1(self.norm(x))))


class Field(nn.Module):
    """Two functions of points in the plane, (..., 2) -> (..., 2)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Linear(2, 6), nn.Linear(6, 2)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.embed(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def linear(seed: int) -> nn.Module:
    """A linear map in three layers. Its slope depends on no activation: no second pass goes through them."""
    return seeded(lambda: Chain(nn.Linear(2, 8), nn.Linear(8, 6), nn.Linear(6, 1)))(seed)


class Energy(nn.Module):
    """Returns an energy for each row and the forces, its gradient, also where gradients are off."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.field = Field(seed)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.field(x).sum((1, 2))
            (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy, forces


def laplacian(model: Any, batch: Any) -> Tensor:
    x = batch[0].detach().requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    seconds = [torch.autograd.grad(slope[..., i].sum(), x, create_graph=True)[0][..., i] for i in (0, 1)]
    residual = sum(seconds) - torch.sin(x[..., 0])
    return residual.square().mean() + u.square().mean()


def penalty(model: Any, batch: Any) -> Tensor:
    """The critic's loss of WGAN-GP: three passes, one of which is differentiated."""
    return model(batch[0]).mean() - model(batch[0] / 2).mean() + penalty_alone(model, batch)


def penalty_alone(model: Any, batch: Any) -> Tensor:
    between = (0.7 * batch[0]).detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return (slope.flatten(1).norm(dim=1) - 1).square().mean()


def transforms(model: Any, batch: Any) -> Tensor:
    points = batch[0].flatten(0, 1)
    hessians = torch.func.vmap(torch.func.hessian(lambda x: model(x).sum()))(points)
    parameters = dict(model.named_parameters())

    def slope_at(x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    slopes = torch.func.vmap(torch.func.grad(slope_at))(points)
    residual = hessians.diagonal(dim1=-2, dim2=-1).sum(-1) - torch.sin(points[:, 0])
    return residual.square().mean() + slopes.square().mean() + model(points).square().mean()


def of_forces(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    energy, forces = outputs
    return (energy - 1).square().mean() + (forces - targets).square().mean()


@dataclass(frozen=True)
class Case:
    model: Callable[[int], nn.Module]
    loss: Callable[..., Tensor]
    plan: tuple[tuple[str, str], ...] = ()


CUT = {"layers.*.fc1": "column", "layers.*.fc2": "row"}
CASES = {
    "laplacian": Case(Field, laplacian, tuple(CUT.items())),
    "penalty": Case(Field, penalty, tuple(CUT.items())),
    "alone": Case(linear, penalty_alone, (("layers.0", "column"), ("layers.1", "row"))),
    "forces": Case(Energy, of_forces, tuple((f"field.{name}", style) for name, style in CUT.items())),
    "func": Case(Field, transforms, tuple(CUT.items())),
}
SEQUENCE = {**CUT, "layers.*.norm": "sequence", "embed": "split", "head": "column_gathered"}


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(count, 2, 2, generator=generator, dtype=torch.float64) for count in (8, 7, 8)]
    return [(x, x.cos()) for x in rows]


@lru_cache
def in_one_process(name: str) -> contract.Trained:
    """A plain loop: each step, then the loss of the same batch in evaluation mode."""
    model, case = CASES[name].model(0), CASES[name]
    loss = contract.of_outputs(case.loss) if name == "forces" else case.loss
    return contract.plain_steps(model, ADAM(model.parameters()), batches(), loss, evaluates=True)


def on_this_rank(case: Case, layout: md.Layout, options: dict[str, Any]) -> contract.Trained:
    engine = md.prepare(case.model(md.rank()), ADAM, layout, loss=case.loss, **options)
    return contract.steps(engine, batches(), evaluates=True)


def check(cluster_of: Clusters, name: str, layout: md.Layout, **options: Any) -> None:
    if layout.tp > 1:
        options["plan"] = SEQUENCE if layout.sequence_parallel else dict(CASES[name].plan)
    for trained in cluster_of(layout.ranks).run(on_this_rank, CASES[name], layout, options):
        contract.compare(trained, in_one_process(name))


LAYOUTS = (
    *("", "recompute=True", "dp=2", "dp=2,recompute=True,micro_batches=2", "dp=2,zero=1", "dp=2,zero=2"),
    *("dp=2,zero=3", "dp=2,zero=3,micro_batches=2", "dp=2,zero=3,recompute=True"),
    *("tp=2", "tp=2,recompute=True", "tp=2,sequence_parallel=True", "dp=2,tp=2,zero=3"),
)
DAILY: dict[str, tuple[str, ...]] = {
    "laplacian": LAYOUTS,
    "penalty": ("dp=2,zero=3", "tp=2,sequence_parallel=True", "recompute=True"),
    "alone": ("dp=2,zero=3", "dp=2,zero=2", "tp=2"),
    "forces": ("dp=2,zero=3", "dp=2,zero=3,recompute=True", "tp=2"),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if layout in daily else pytest.mark.deep)
        for name, daily in DAILY.items()
        for layout in LAYOUTS
        if name in ("laplacian", "penalty") or "sequence_parallel" not in layout
    ],
)
def test_laplacians_penalties_and_forces(cluster_of: Clusters, name: str, layout: str) -> None:
    check(cluster_of, name, PARSE(layout) if layout else md.Layout())


@pytest.mark.parametrize("layout", ["", "recompute=True", "dp=2", "dp=2,zero=1", "dp=2,zero=2"])
def test_torch_func_in_the_loss(cluster_of: Clusters, layout: str) -> None:
    check(cluster_of, "func", PARSE(layout) if layout else md.Layout())


@pytest.mark.parametrize(
    ("name", "layout"), [("laplacian", "dp=2,zero=3"), ("func", "dp=2"), ("forces", "tp=2")]
)
def test_a_rehearsal_takes_such_steps_too(cluster_of: Clusters, name: str, layout: str) -> None:
    check(cluster_of, name, PARSE(layout), rehearse=True)


def test_a_recorded_pass_gathers_once_and_reduces_nothing(cluster_of: Clusters) -> None:
    """A step with a penalty sends what the same passes without one send, and the penalty's pass nothing."""

    def sent(loss: Any) -> int:
        engine = md.prepare(Field(0), ADAM, md.Layout(dp=2, zero=3), loss=loss)
        for x, y in batches()[:2]:
            with md.comm.ledger() as ledger:
                engine.step(x, y)
        return int(ledger.bytes_sent)

    def one_pass(model: Any, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()  # type: ignore[no-any-return]

    cluster = cluster_of(2)
    assert cluster.run(sent, penalty_alone) == cluster.run(sent, one_pass)


@pytest.mark.parametrize("layout", ["dp=2,zero=3", "tp=2"])
def test_torch_func_is_refused_where_it_cannot_work(cluster_of: Clusters, layout: str) -> None:
    with pytest.raises(md.RankError) as caught:
        check(cluster_of, "func", PARSE(layout), rehearse=True)
    what = "zero=3" if "zero" in layout else "tensor parallelism"
    remedy = "does not work inside it; use torch.autograd.grad(outputs, inputs, create_graph=True), or dp"
    assert (
        f"NotImplementedError: torch.func (grad, hessian, vmap, ...) is at work, and {what} {remedy}"
        in str(caught.value)
    )
    assert "column_packed" not in str(caught.value)


def shared_logits(x: Tensor) -> Tensor:
    return vocab_parallel_cross_entropy(x, torch.tensor([1, 2, 0]))


def over_all_ranks(x: Tensor) -> Tensor:
    norm = nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64))
    batch_norm.synchronize(norm, None)
    return norm(x).square().sum()


def in_a_ring(x: Tensor) -> Tensor:
    q = x.view(1, 1, 3, 4)
    return ring_attention(q, q, q).square().sum()


ONCE: dict[Callable[[Tensor], Tensor], str] = {
    shared_logits: "the loss of logits that ranks share has none; write your own loss, which gets all logits",
    over_all_ranks: "a synchronized BatchNorm has none; leave batch_norm='synchronized' out, or use a",
    in_a_ring: "ring attention has none; use a layout with cp=1",
}


@pytest.mark.parametrize("function", ONCE)
def test_what_has_no_second_derivative_says_so(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(function(x), x)[0].shape == x.shape
    with pytest.raises(NotImplementedError, match=ONCE[function]):
        torch.autograd.grad(function(x), x, create_graph=True)


# Planted faults.


def summed_twice(patch: pytest.MonkeyPatch) -> None:
    """The derivative of a sum over tensor-parallel ranks is summed over them once more."""

    def leave(x: Tensor, group: Any) -> Tensor:
        def total(own: Tensor) -> Tensor:
            return operators.start_all_reduce(own.clone(), group)()

        return operators._pair(x, total, total)

    patch.setattr(linear_layers, "OPERATORS", [(operators.copy_to_ranks, leave)] * 2)


def left_where_they_are(patch: pytest.MonkeyPatch) -> None:
    """Gradients that come without a pass through the units are not reduced."""

    def finish(self: Any) -> None:
        self._complete(self._backward)
        self._reset()

    patch.setattr(unit_runtime.UnitRuntime, "finish", finish)


@pytest.mark.parametrize(
    ("fault", "name", "layout"),
    [(summed_twice, "laplacian", "tp=2"), (left_where_they_are, "alone", "dp=2,zero=3")],
)
def test_planted_faults_are_found(
    cluster_of: Clusters, fault: Callable[[pytest.MonkeyPatch], None], name: str, layout: str
) -> None:
    options = (
        {"plan": dict(CASES[name].plan), "check_plan": False, "check_loss": False} if "tp" in layout else {}
    )
    given = CASES[name], PARSE(layout), options
    for trained in cluster_of(2).run(contract.with_fault, fault, on_this_rank, *given):
        with pytest.raises(AssertionError):
            contract.compare(trained, in_one_process(name))
