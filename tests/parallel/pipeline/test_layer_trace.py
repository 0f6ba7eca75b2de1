"""How a model calls its layers is found on rows of a batch, and what a pipeline cannot cut is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.model import MLP, cross_entropy
from minidist.parallel.pipeline.layer_chain import find_chain
from minidist.parallel.pipeline.layer_trace import Sent, trace_layers
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.models import vectors
from tests.parallel.pipeline.test_layer_chain import in_order, residual, with_relu
from tests.parallel.pipeline.test_model_stage import EXAMPLES, OwnGPT
from tests.parallel.sharding.cases import CASES

PP = md.Layout(pp=2)
ROWS = torch.zeros(2, 4)


class Net(nn.Module):
    """A part before some layers, and one after them; the layers are called by a function of the test's."""

    def __init__(
        self,
        forward: Callable[[Any, Any], Any],
        layer: Callable[[], nn.Module] | None = None,
        count: int = 3,
    ) -> None:
        super().__init__()
        make = layer or partial(nn.Linear, 4, 4)
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.calls = forward

    def forward(self, x: Tensor) -> Any:
        return self.after(self.calls(self.blocks, self.before(x)))


BROKEN: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "between": (with_relu, r"blocks\.1 is called with something computed from what blocks\.0 gave"),
    "residual": (residual, r"blocks\.1 is called with something computed from what blocks\.0 gave"),
    "order": (lambda n, x: n[2](n[0](n[1](x))), r"blocks\.1 is called where blocks\.0 is next"),
    "twice": (lambda n, x: in_order(n, in_order(n, x)), r"blocks\.0 is called after the last one"),
    "left out": (lambda n, x: n[1](n[0](x)), r"blocks\.2 is not called"),
    "side by side": (
        lambda n, x: n[2](x + n[1](x) + n[0](x)),
        r"blocks\.1 is called where blocks\.0 is next",
    ),
    "not its output": (
        lambda n, x: (n[0](x), n[1](x))[1],
        r"blocks\.1 is called with something that does not",
    ),
    "all": (
        lambda n, x: sum_of_all(n, x),
        r"its outputs are computed from what blocks\.0 gave, and not from",
    ),
    "wrong": (lambda n, x: in_order(n, x[:, :3]), r"after blocks\.0 it raises RuntimeError: "),
}


def sum_of_all(layers: Any, x: Any) -> Any:
    total = 0
    for layer in layers:
        x = layer(x)
        total = total + x
    return total


@pytest.mark.parametrize("name", BROKEN)
def test_layers_that_are_not_called_one_after_the_other_are_refused(name: str) -> None:
    forward, message = BROKEN[name]
    with pytest.raises(ValueError, match=message) as caught:
        find_chain(Net(forward), PP, None, ROWS)
    assert str(caught.value).startswith("pp is 2, and a Net cannot be cut between its blocks, which have")


def test_a_name_that_no_list_has_and_a_missing_example_are_told() -> None:
    net = Net(in_order)
    with pytest.raises(ValueError, match=r"unknown list of layers 'block': did you mean 'blocks'\?"):
        find_chain(net, PP, "block", ROWS)
    with pytest.raises(ValueError, match=r"known are none: the model has no nn\.ModuleList"):
        find_chain(nn.Linear(2, 2), PP, "blocks", ROWS)
    with pytest.raises(ValueError, match="nothing says how a Net is called; give example=, a batch"):
        find_chain(net, PP, "blocks", None)
    with pytest.raises(ValueError, match=r"a Net has no `layers`, .*; or give example=, a batch"):
        find_chain(net, PP, None, None)
    with pytest.raises(ValueError, match="4 parts, and the model has 3 layers"):
        find_chain(net, md.Layout(pp=4), None, ROWS)
    with pytest.raises(
        TypeError, match=r"layers is a ModuleList; give the list's name, such as 'model\.layers'"
    ):
        find_chain(net, PP, net.blocks, ROWS)  # type: ignore[arg-type]
    net.others = nn.ModuleList([nn.Linear(4, 4)])
    with pytest.raises(ValueError, match="a Net has 2 lists of layers, blocks, others; give layers="):
        find_chain(net, PP, None, ROWS)
    assert find_chain(MLP((3, 4, 5)), PP, None, None) is None
    with pytest.raises(ValueError, match="layers is 'layers' and the layout has pp=1"):
        md.prepare(MLP((3, 4, 5)), torch.optim.SGD, layers="layers")


def test_each_parameter_is_found_where_it_is_needed() -> None:
    model = OwnGPT(0)
    before = [(part, dict(part.__dict__)) for part in model.modules()]
    state = torch.get_rng_state()
    trace = trace_layers(model, "blocks", EXAMPLES["own"])
    assert trace.before == {"token.weight", "positions"}
    assert trace.after == {"token.weight", "head_norm.weight", "head_norm.bias"}
    assert [each.beside for each in trace.calls] == [{"bias"}] * 6
    assert trace.calls[1].received == {0: (0, 0)}
    assert trace.calls[1].output == (Sent(0), None)  # the scores go nowhere
    assert [(part, dict(part.__dict__)) for part in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)


class Passing(nn.Module):
    """Takes and gives a tuple: a hidden state, a sum over the layers so far, and a mask as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, total, mask = given
        x = self.linear(x).tanh().masked_fill(mask, 0.5)
        return x, total + x.square().mean(-1), mask


def through_tuples(layers: Any, x: Tensor) -> Tensor:
    x, total, _ = in_order(layers, (x, x.new_zeros(len(x)), x > 0.3))
    return x + total[:, None]


def passing(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Net(through_tuples, Passing).double()


def past_the_layers(seed: int) -> nn.Module:
    """What the first part computes goes past all layers, too: two stages need it."""
    torch.manual_seed(seed)
    return Net(lambda layers, x: x + in_order(layers, x)).double()


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("model", [passing, past_the_layers])
def test_more_than_one_tensor_goes_on(
    cluster_of: Clusters, model: Callable[[int], nn.Module], schedule: str
) -> None:
    case = replace(CASES["mlp"], model=model, rows=partial(vectors, width=4, classes=4), loss=cross_entropy)
    layout = md.Layout(pp=3, micro_batches=2, schedule=schedule)
    contract.check(cluster_of, case, layout, example=ROWS.double())


class Experts(nn.Module):
    """A mixture of experts: each gets the rows that a router sends to it, and a count of them on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.balance: Any = None

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        result = torch.zeros(len(x), 4, dtype=x.dtype)
        for number, expert in enumerate(self.experts):
            own = (chosen == number).nonzero()[:, 0]
            if len(own):
                result = result.index_add(0, own, expert(x[own]) * weights[own, number, None])
        self.balance = weights.mean(0).square().sum()
        return x + result.tanh()


def test_a_model_without_values_is_tried_without_them() -> None:
    with torch.device("meta"):
        model = Net(in_order)
        experts = Net(in_order, Experts)
    assert trace_layers(model, "blocks", ROWS).calls[2].received == {0: (0, 0)}
    with pytest.raises(
        ValueError, match=r"before blocks\.0|after blocks\.0 .* meta device, where tensors have"
    ):
        find_chain(experts, PP, None, ROWS)


def with_forces(layers: Any, x: Tensor) -> Tensor:
    """A gradient with respect to the model's input, which reaches the result on two ways."""
    y = in_order(layers, x)
    (slope,) = torch.autograd.grad((y + x.square()).sum(), x, create_graph=True)
    return y + slope


def test_a_model_that_takes_a_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match=r"it takes a gradient itself, .* or use dp or tp"):
        find_chain(Net(with_forces), PP, None, ROWS)


def test_a_layer_that_returns_its_input() -> None:
    net = Net(in_order, nn.Identity)
    assert trace_layers(net, "blocks", ROWS).after == {"after.weight", "after.bias"}
