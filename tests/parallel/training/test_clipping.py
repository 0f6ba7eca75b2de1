"""Clipping by the global norm: one process's, whatever the ranks hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.parallel.training.clipping import clip_grad_norm, global_norm
from tests.helpers import contract
from tests.helpers.models import mlp, vectors

Clusters = Callable[[int], md.Cluster]


# Not Adam, whose updates hardly change where all gradients are scaled. Some norms are below 0.7, some above.
CASE = contract.Case(mlp, vectors, partial(torch.optim.SGD, lr=0.5, momentum=0.9), clip_norm=0.7)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_clipping_meets_the_contract(cluster_of: Clusters, ranks: int, micro_batches: int) -> None:
    contract.check(cluster_of(ranks), CASE, md.Layout(dp=ranks, micro_batches=micro_batches))


class Complex(nn.Module):
    """Complex weights beside real ones, as of a spectral or a state-space layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(5, 6, generator=draw, dtype=torch.complex128))
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=torch.float64) for _ in range(2))
        for parameter in self.layers.parameters():
            nn.init.normal_(parameter, generator=draw)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.weight.dtype) @ self.weight.T
        y = torch.tanh(y.real + y.abs())
        for layer in self.layers:
            y = layer(y)
        return y


COMPLEX = replace(CASE, model=Complex, clip_norm=0.3)


@pytest.mark.parametrize("layout", ["dp", "zero=1", "zero=2", "zero=3", "hybrid", "tp", "pp"])
def test_complex_gradients_are_clipped_by_one_norm(cluster_of: Clusters, layout: str) -> None:
    options: dict[str, Any] = {}
    if layout == "hybrid":
        shape = md.Layout(dp=4, zero=3, shard=2)
    elif layout == "tp":
        shape, options["plan"] = md.Layout(tp=2), {"layers.0": "column", "layers.1": "row"}
    elif layout == "pp":
        shape, options["example"] = md.Layout(pp=2, micro_batches=2), COMPLEX.global_batches()[0][0]
    else:
        shape = md.Layout(dp=2, zero=int(layout[-1]) if layout != "dp" else 0)
    contract.check(cluster_of(shape.ranks), COMPLEX, shape, **options)


@pytest.mark.parametrize("zero", [1, 2])
def test_sparse_gradients_that_no_optimizer_uses_count(cluster_of: Clusters, zero: int) -> None:
    """Of the table, which the optimizer does not get."""

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        table = nn.EmbeddingBag(6, 4, mode="sum", sparse=True, dtype=torch.float64)
        return nn.Sequential(table, nn.Linear(4, 3, dtype=torch.float64))

    def rows(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        draw = partial(torch.randint, generator=generator)
        return draw(6, (count, 2)), draw(3, (count,))

    def last_layer(named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for name, p in named_parameters if name != "0.weight"], lr=0.5)

    def train() -> tuple[float | None, Tensor]:
        engine = md.prepare(model(md.rank()), last_layer, md.Layout(dp=2, zero=zero), clip_norm=0.1)
        engine.step(inputs[md.rank() :: 2], targets[md.rank() :: 2])
        return engine.grad_norm, engine.full_state_dict()["1.weight"]

    inputs, targets = rows(torch.Generator().manual_seed(0), 7)
    alone = model(0)
    CASE.loss(alone(inputs), targets).backward()  # type: ignore[no-untyped-call]
    norm = global_norm(p.grad for p in alone.parameters() if p.grad is not None)
    expected = alone[1].weight - 0.5 * alone[1].weight.grad * 0.1 / (norm + 1e-6)
    for found, weight in cluster_of(2).run(train):
        assert found == pytest.approx(norm, rel=1e-12)
        torch.testing.assert_close(weight, expected.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("norm_type", [1, 2, 3.0, math.inf])
def test_other_norms_than_the_euclidean(cluster_of: Clusters, norm_type: float) -> None:
    whole = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def clip(last: float) -> tuple[float, Tensor]:
        values = torch.cat([whole[:-1], torch.tensor([last], dtype=torch.float64)])
        share = nn.Parameter(torch.zeros_like(values.tensor_split(md.size())[md.rank()]))
        share.grad = values.tensor_split(md.size())[md.rank()].clone()
        return clip_grad_norm([share], 0.5, sharded=True, norm_type=norm_type), share.grad

    results = cluster_of(3).run(clip, float(whole[-1]))
    expected = nn.Parameter(torch.zeros_like(whole))
    expected.grad = whole.clone()
    norm = float(nn.utils.clip_grad_norm_([expected], 0.5, norm_type))
    assert [result[0] for result in results] == [pytest.approx(norm, rel=1e-12)] * 3
    torch.testing.assert_close(
        torch.cat([result[1] for result in results]), expected.grad, rtol=1e-12, atol=0
    )
    for bad in (math.inf, math.nan):  # all ranks hear of it
        assert not any(math.isfinite(result[0]) for result in cluster_of(3).run(clip, bad))


def test_a_norm_type_that_is_none() -> None:
    for wrong in (0, -1.0, "2", True, math.nan):
        with pytest.raises(ValueError, match=r"norm_type is .*; give the p of a p-norm"):
            clip_grad_norm([], 1.0, norm_type=wrong)  # type: ignore[arg-type]


def test_what_torch_does_with_gradients_of_all_kinds() -> None:
    def gradients(of: str) -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(1)
        parameters = [nn.Parameter(torch.zeros(size)) for size in ((3, 4), (0,), ())]
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        assert parameters[0].grad is not None
        if of != "finite":
            parameters[0].grad[0, 0] = float(of)
        return [*parameters, nn.Parameter(torch.zeros(2))]

    for of in ("finite", "inf", "nan"):
        ours, theirs = gradients(of), gradients(of)
        norm = clip_grad_norm(ours, 0.5)
        expected = float(nn.utils.clip_grad_norm_(theirs, 0.5))
        assert norm == pytest.approx(expected, rel=1e-6, nan_ok=True)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.grad, b.grad, equal_nan=True)
    with torch.sparse.check_sparse_tensor_invariants():  # torch 2.11 warns where nobody has chosen
        assert global_norm([torch.sparse_coo_tensor([[1, 1]], [3.0, 4.0], (5,))]) == 7.0
    assert global_norm([torch.tensor([3 + 4j, 12j])]) == 13.0
    assert global_norm([]) == 0.0
    assert global_norm([torch.full((4,), 60000.0, dtype=torch.float16)]) == 120000.0
    with pytest.raises(ValueError, match="max_norm is -1; give the largest norm"):
        clip_grad_norm([], -1)
