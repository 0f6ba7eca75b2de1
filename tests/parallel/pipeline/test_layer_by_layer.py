"""Layers cut over the ranks: the gradients of one process, and where the cuts fall."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.model import MLP
from minidist.model.loss import accuracy, cross_entropy
from minidist.parallel.pipeline import schedules
from minidist.parallel.pipeline.layer_by_layer import LayerByLayer, cut, measure

Clusters = Callable[[int], md.Cluster]
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def model() -> MLP:
    return MLP((6, 5, 7, 4, 3), dtype=torch.float64)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (rows,), generator=generator)


Found = list[tuple[float, float, list[Tensor]]]


def train() -> tuple[Found, list[int]]:
    layers = model().layers
    part = nn.Sequential(*(layers[i] for i in cut(layers, md.size())[md.rank()]))
    parallel = LayerByLayer(part)
    found, sent = [], []
    for rows in (5, 1, 8):
        part.zero_grad()
        with comm.ledger() as ledger:
            loss = parallel.step(*batch(rows))
        sent.append(ledger.bytes_sent)
        right = parallel.evaluate(*batch(rows), accuracy)
        found.append((loss, right, [p.grad.clone() for p in part.parameters() if p.grad is not None]))
    return found, sent


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gradients_are_those_of_one_process(cluster_of: Clusters, ranks: int) -> None:
    results = cluster_of(ranks).run(train) if ranks > 1 else [train()]
    whole = model()
    for number, rows in enumerate((5, 1, 8)):
        inputs, targets = batch(rows)
        whole.zero_grad()
        outputs = whole(inputs)
        loss = cross_entropy(outputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients: list[Tensor] = []
        for found, _ in results:
            torch.testing.assert_close([*found[number][:2]], [loss.item(), float(accuracy(outputs, targets))])
            gradients += found[number][2]
        torch.testing.assert_close(gradients, [p.grad for p in whole.parameters()], **EXACT)


def test_evaluation_leaves_every_module_in_its_mode() -> None:
    part = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    part[0].eval()
    LayerByLayer(part).evaluate(*batch(4))
    assert [module.training for module in part.modules()] == [True, False, True]
    with pytest.raises(RuntimeError):
        LayerByLayer(part).evaluate(torch.ones(4, 7, dtype=torch.float64), batch(4)[1])
    assert [module.training for module in part.modules()] == [True, False, True]


def test_a_step_sends_outputs_and_gradients(cluster_of: Clusters) -> None:
    (_, first), (_, last) = cluster_of(2).run(train)
    (cut_at,) = [part.stop for part in cut(model().layers, 2)[:1]]
    width = model().sizes[cut_at]
    assert first == [80 + 8 * rows * width for rows in (5, 1, 8)]
    assert last == [8 * rows * width + 8 for rows in (5, 1, 8)]


def test_only_one_rank_works_at_a_time() -> None:
    for ranks in (1, 2, 5):
        assert schedules.simulate(schedules.gpipe(ranks, 1)).bubble == pytest.approx(1 - 1 / ranks)


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


class Part(nn.Module):
    """Gives its input with two dimensions exchanged, or whatever `wrong` makes of it."""

    def __init__(self, wrong: Callable[[Tensor], object] | None = None) -> None:
        super().__init__()
        torch.manual_seed(md.rank())
        self.linear, self.wrong = nn.Linear(4, 4, dtype=torch.float64), wrong

    def forward(self, x: Tensor) -> object:
        return self.wrong(x) if self.wrong else self.linear(x).transpose(1, 2)


def test_outputs_may_lie_in_memory_in_any_order(cluster_of: Clusters) -> None:
    def step() -> list[Tensor | None]:
        part = Part()
        x = torch.arange(32.0, dtype=torch.float64).view(2, 4, 4)
        LayerByLayer(part, lambda y, t: (y.sin() * t).sum()).step(x, x)
        return [*(p.detach() for p in part.parameters()), *(p.grad for p in part.parameters())]

    results = cluster_of(2).run(step)
    weights = [value.requires_grad_() for found in results for value in found[:2]]
    x = torch.arange(32.0, dtype=torch.float64).view(2, 4, 4)
    y = x
    for weight, bias in (weights[:2], weights[2:]):
        y = nn.functional.linear(y, weight, bias).transpose(1, 2)
    expected = torch.autograd.grad((y.sin() * x).sum(), weights)
    torch.testing.assert_close([g for found in results for g in found[2:]], [*expected], **EXACT)


def test_evaluation_leaves_modes_as_they_were(cluster_of: Clusters) -> None:
    def evaluate() -> list[bool]:
        def bad(x: Tensor) -> Tensor:
            raise ArithmeticError

        frozen = nn.Dropout().eval()
        part = nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), frozen)
        LayerByLayer(part).evaluate(*batch(5))
        modes = [part.training, frozen.training]
        failing = LayerByLayer(nn.Sequential(part, Part(bad)))
        if md.rank() == 0:
            with suppress(ArithmeticError):
                failing.evaluate(*batch(5))
        return [*modes, part.training, frozen.training]

    assert cluster_of(2).run(evaluate) == [[True, False, True, False]] * 2


def test_what_cannot_go_to_the_next_part_is_told(cluster_of: Clusters) -> None:
    def step(wrong: Callable[[Tensor], object]) -> None:
        LayerByLayer(Part(wrong)).step(torch.zeros(2, 4, 4, dtype=torch.float64), torch.zeros(2))

    with pytest.raises(md.RankError, match="stage 0 gave a tuple; between stages goes one floating-point"):
        cluster_of(2).run(step, lambda x: (x, "a mask"))
    with pytest.raises(md.RankError, match="a stage gave int64"):
        cluster_of(2).run(step, lambda x: x.long())


def test_a_step_without_gradients_is_told_before_anything_is_sent() -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients are off here"):
        LayerByLayer(nn.Linear(6, 3)).step(*batch(2))
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients are off here"):
        md.Pipeline(nn.Linear(6, 3)).step(*batch(2))


def test_wrong_arguments_are_told() -> None:
    layers = [nn.Identity(), nn.Identity()]
    with pytest.raises(ValueError, match="parts is 3 and there are 2 layers; give 1 to 2"):
        cut(layers, 3)
    with pytest.raises(ValueError, match="give one of 0 or more"):
        cut(layers, 2, [1.0])
    with pytest.raises(TypeError, match=r"part is a list; give a .* with this rank's layers"):
        LayerByLayer(layers)  # type: ignore[arg-type]
