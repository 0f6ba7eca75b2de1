"""A rehearsal refuses a plan that makes another model, and names the first layer; other plans train."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import minidist as md
from minidist.parallel.tensor_parallel.plans import plan_for
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.refusals import refused_on_ranks
from tests.parallel.tensor_parallel.test_replace_layers import (
    FLAT_PLAN,
    OWN_PLAN,
    Flat,
    Own,
    gpt,
    tokens,
    vectors,
)

SGD = partial(torch.optim.SGD, lr=0.1)


class Between(nn.Module):
    """A residual of a matrix, a function of its features, and another matrix; then a last matrix."""

    def __init__(self, act: Callable[[Tensor], Tensor], hidden: int, inner: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.act = nn.Linear(8, hidden), act
        self.second, self.last = nn.Linear(inner, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 8) -> (B, T, 4)
        return self.last(x + self.scale * self.second(self.act(self.first(x))))


def swiglu(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return functional.silu(gate) * up


def softmax(y: Tensor) -> Tensor:
    return y.softmax(dim=-1)


WRONG = {
    "packed swiglu": partial(Between, swiglu, 32, 16),
    "softmax": partial(Between, softmax, 16, 16),
}
PLAN = {"first": "column", "second": "row"}


def batch(rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(rows, 5, 8, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 4, (rows, 5), generator=generator)


def first_loss(model: Callable[[], nn.Module], layout: str, **options: Any) -> float:
    """Of a rank's share of the batch, in the model's own type."""
    made = model()
    engine = md.prepare(made, SGD, md.Layout.parse(layout), **{"plan": PLAN, "rehearse": True, **options})
    inputs, targets = (x[engine.data_rank :: engine.data_ranks] for x in batch(4))
    return engine.step(inputs, targets)


REFUSED = r"The plan makes another model: the output of second differs by \d.*column_packed=3"


@pytest.mark.parametrize("name", WRONG)
def test_a_plan_that_makes_another_model_is_refused(cluster_of: Clusters, name: str) -> None:
    refused_on_ranks(cluster_of(2), ValueError, REFUSED, first_loss, WRONG[name], "tp=2")


@pytest.mark.parametrize("option", ["check_plan", "check_loss"])
def test_the_old_arguments_switch_it_off(cluster_of: Clusters, option: str) -> None:
    losses = cluster_of(2).run(
        partial(first_loss, **{option: False}, rehearse=None), WRONG["softmax"], "tp=2"
    )
    inputs, targets = batch()
    outputs = WRONG["softmax"]()(inputs)
    assert abs(losses[0] - md.cross_entropy(outputs, targets).item()) > 1e-4  # what it is for


class TwoParts(nn.Module):
    """A chain whose second layer has a branch that does not count yet."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 8)
        self.scale, self.last = nn.Parameter(torch.zeros(())), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        weighted = (self.scale * hidden.square().mean(-1, keepdim=True)) * hidden.new_ones(8)
        return self.last(x + self.second(hidden) + weighted)


def test_gradients_are_compared_too(cluster_of: Clusters) -> None:
    told = r"The plan makes another model\..*the gradient of scale differs"
    refused_on_ranks(cluster_of(2), ValueError, told, first_loss, TwoParts, "tp=2")


def test_a_layer_that_fails_when_cut_is_named(cluster_of: Clusters) -> None:
    def heads(y: Tensor) -> Tensor:
        return y.view(*y.shape[:-1], 4, 4).flatten(2)

    told = "the model fails once the plan has cut the model: shape.*column_packed"
    refused_on_ranks(cluster_of(2), ValueError, told, first_loss, partial(Between, heads, 16, 16), "tp=2")


@pytest.mark.parametrize(
    "layout",
    ["tp=2", "dp=2,tp=2,zero=3", "tp=2,sequence_parallel=True", "dp=2,tp=2,zero=1,micro_batches=2", "tp=3"],
)
def test_plans_that_fit_train_as_before(cluster_of: Clusters, layout: str) -> None:
    made, plan = (gpt, plan_for(gpt(0))) if "sequence" in layout else (Own, OWN_PLAN)
    case = contract.Case(made, tokens, batches=(4, 2, 3))
    contract.check(cluster_of, case, layout, plan=plan, rehearse=True)
    if layout == "tp=2":  # each row is one token, so queries and keys have gradients of rounding alone
        case = contract.Case(Flat, vectors, batches=(4, 2, 3))
        contract.check(cluster_of, case, layout, plan=FLAT_PLAN, rehearse=True)


@pytest.mark.parametrize("layout", ["tp=2,precision=bf16", "tp=2,sequence_parallel=True"])
def test_rounding_and_dropout_are_no_difference(cluster_of: Clusters, layout: str) -> None:
    def train(rehearse: bool) -> float:
        model = gpt(0, dropout=0.2, layers=4).float()
        torch.manual_seed(1)
        layers = md.Layout.parse(layout)
        engine = md.prepare(model, SGD, layers, plan=plan_for(model), rehearse=rehearse)
        return engine.step(*tokens(torch.Generator().manual_seed(0), 3))

    assert cluster_of(2).run(train, True) == cluster_of(2).run(train, False)
