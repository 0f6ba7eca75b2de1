"""Layers cut over the ranks: the gradients of one process, and where the cuts fall."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.model import MLP
from minidist.model.loss import accuracy, cross_entropy
from minidist.parallel.layerwise.layer_by_layer import LayerByLayer, cut, measure
from tests.conftest import Clusters

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def model() -> MLP:
    return MLP((6, 5, 7, 4, 3), dtype=torch.float64)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (rows,), generator=generator)


def train() -> list[tuple[float, float, list[Tensor | None]]]:
    layers, found = model().layers, []
    part = nn.Sequential(*(layers[i] for i in cut(layers, md.size())[md.rank()]))
    parallel = LayerByLayer(part)
    for rows in (5, 1, 8):
        part.zero_grad()
        losses = parallel.step(*batch(rows)), parallel.evaluate(*batch(rows), accuracy)
        found.append((*losses, [p.grad for p in part.parameters()]))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gradients_are_those_of_one_process(cluster_of: Clusters, ranks: int) -> None:
    results = cluster_of(ranks).run(train) if ranks > 1 else [train()]
    for number, rows in enumerate((5, 1, 8)):
        whole, (inputs, targets) = model(), batch(rows)
        outputs = whole(inputs)
        loss = cross_entropy(outputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        for found in results:
            torch.testing.assert_close([*found[number][:2]], [loss.item(), float(accuracy(outputs, targets))])
        gradients = [gradient for found in results for gradient in found[number][2]]
        torch.testing.assert_close(gradients, [p.grad for p in whole.parameters()], **EXACT)


def lightest(weights: list[float], parts: int) -> tuple[float, float]:
    """By trying all cuts: the least heaviest part, and of those the least sum of squares."""
    count = len(weights)
    best = (float("inf"), float("inf"))
    for inner in itertools.combinations(range(1, count), parts - 1):
        edges = [0, *inner, count]
        sums = [sum(weights[a:b]) for a, b in itertools.pairwise(edges)]
        best = min(best, (max(sums), sum(s * s for s in sums)))
    return best


def test_the_heaviest_part_is_as_light_as_can_be() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 9):
        for parts in range(1, count + 1):
            weights = torch.randint(0, 9, (count,), generator=generator).tolist()
            layers = [nn.Identity() for _ in weights]
            found = cut(layers, parts, weights)
            assert [i for part in found for i in part] == [*range(count)]
            assert all(len(part) for part in found)
            sums = [sum(weights[i] for i in part) for part in found]
            assert (max(sums), sum(s * s for s in sums)) == lightest(weights, parts)


def test_parameters_weigh_where_nothing_else_is_said() -> None:
    layers = [nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1), nn.Linear(1, 1)]
    assert cut(layers, 2) == [range(1), range(1, 4)]
    assert cut(layers, 2, [1, 1, 1, 1]) == [range(2), range(2, 4)]


def test_measured_seconds_weigh_layers() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return 2 * x

    layers = [*model().layers, Counting()]
    seconds = measure(layers, batch(8)[0], repeats=2)
    assert len(seconds) == 5
    assert min(seconds) > 0
    assert Counting.calls == 2
    assert all(p.grad is None for layer in layers for p in layer.parameters())
