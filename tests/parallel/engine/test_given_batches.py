"""Batches of any structure, lists of them, and loaders that end at different times."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.model import MLP
from tests.helpers.contract import own_rows, plain_steps
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import refuses

PARSE = md.Layout.parse
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
LAYOUTS = [
    "dp=2,micro_batches=2",
    "dp=2,zero=1",
    "dp=2,zero=2,micro_batches=2",
    "dp=2,zero=3,micro_batches=2",
]


@dataclass(frozen=True)
class Graph:
    nodes: Tensor
    edges: dict[str, Tensor]
    name: str


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Model(nn.Module):
    """Vectors of 6 -> a pair of outputs, of which one passes a frozen layer. It takes all the structures."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.Tanh())
        self.frozen, self.adapter = nn.Linear(7, 3).requires_grad_(False), nn.Linear(7, 3, bias=False)
        self.other = nn.Linear(7, 2)
        self.double()

    def forward(self, nodes: Any, scale: Tensor | None = None, names: Any = None) -> tuple[Tensor, Pair]:
        if isinstance(nodes, Graph):
            nodes, scale = nodes.nodes, nodes.edges["scale"]
        x = self.layers(nodes)
        x = x if scale is None else x * scale[:, None]
        y = self.frozen(x) + self.adapter(x)
        return y, Pair(self.other(x), y.detach())


def loss(outputs: tuple[Tensor, Pair], targets: Any) -> Tensor:
    y, (left, right) = outputs
    if isinstance(targets, Graph):
        targets = targets.nodes
    if isinstance(targets, dict | UserDict):
        targets = targets["nodes"]
    return (y - targets[:, :3]).square().mean() + (left - targets[:, 3:5]).square().mean() + right.mean() * 0


def rows(count: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return x, torch.rand(count, generator=generator, dtype=torch.float64)


STRUCTURES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dict": lambda x, scale: ({"nodes": x, "scale": scale, "names": ["any", "thing"]},),
    "user dict": lambda x, scale: (UserDict(nodes=x, scale=scale),),
    "dataclass": lambda x, scale: (Graph(x, {"scale": scale}, "g"),),
    "tuple and dict": lambda x, scale: ((x, scale), {"nodes": x}),
    "triple": lambda x, scale: ((x, scale, None), x),
    "pair": lambda x, scale: (({"nodes": x, "scale": scale}, x),),
    "collated": lambda x, scale: ([{"nodes": x, "scale": scale}, x],),
}
BATCHES = [rows(count, step) for step, count in enumerate((7, 4, 9))]


def reference() -> dict[str, Tensor]:
    model = Model(0)
    return plain_steps(model, optimizer_of(model), BATCHES, lambda model, b: loss(model(*b), b[0])).state


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return SGD([p for p in model.parameters() if p.requires_grad])


@on_ranks(2, layout=LAYOUTS)
def test_batches_of_any_structure(layout: str) -> None:
    expected = reference()
    for make in STRUCTURES.values():
        engine = md.prepare(Model(md.rank()), SGD, PARSE(layout), loss)
        for each in BATCHES:
            engine.step(*make(*own_rows(engine, each)))
        torch.testing.assert_close(engine.full_state_dict(), expected, **EXACT)


# What is refused.


X = torch.zeros(4, 6, dtype=torch.float64)


test_a_batch_that_is_none = refuses(
    lambda given: md.prepare(Model(0), SGD, None, loss).step(*given),
    (({"nodes": X, "labels": X[:3]},), 'batch["labels"] has 3 rows, batch["nodes"] 4; the fi'),
    (({"nodes": X}, {"a": [X[:2]]}), 'targets["a"][0] has 2 rows, inputs["nodes"] 4; the fi'),
    (([],), "the list of batches is empty; give at least one batch"),
    (({"nodes": "x"},), TypeError, "the batch is a dict; give a tensor whose first dimension is the rows"),
    (({"nodes": X[:0]},), "inputs have no rows; give a batch of at least one"),
    literal=True,
)


def test_a_metric_in_the_place_of_targets() -> None:
    engine = md.prepare(Model(0), SGD, None, loss)
    with pytest.raises(TypeError, match=r"targets are a function; name a metric, .*metric=accuracy"):
        engine.evaluate([({"nodes": X}, X)], loss)


@on_ranks(2)
def test_a_pipeline_takes_one_tensor() -> None:
    engine = md.prepare(MLP((6, 6, 6)), SGD, md.Layout(pp=2))
    with pytest.raises(
        TypeError, match=r"inputs are a dict, and the model is a chain .* first takes one tens"
    ):
        engine.step({"input": X})
