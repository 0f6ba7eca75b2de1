"""Clipping by the global norm: one process's, whatever the ranks hold."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.parallel.training.clipping import check_max_norm, check_norm_type, clip_factor, global_norm
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.models import mlp, vectors


def clipped(parameters: list[nn.Parameter], sharded: bool = False, norm_type: float = 2.0) -> float:
    """Shorten the parameters' gradients to a norm of 0.5, as an engine does; returns the norm before."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = global_norm(gradients, sharded, norm_type=norm_type)
    for gradient in gradients:
        gradient.mul_(clip_factor(norm, 0.5))
    return norm


# Not Adam, whose updates hardly change where all gradients are scaled. Some norms are below 0.7, some above.
CASE = contract.Case(mlp, vectors, partial(torch.optim.SGD, lr=0.5, momentum=0.9), clip_norm=0.7)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_clipping_meets_the_contract(cluster_of: Clusters, ranks: int, micro_batches: int) -> None:
    contract.check(cluster_of, CASE, md.Layout(dp=ranks, micro_batches=micro_batches))


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


LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"dp=2,zero={zero}": {} for zero in (1, 2, 3)},
    **{"dp=2": {}, "dp=4,zero=3,shard=2": {}, "tp=2": {"plan": {"layers.0": "column", "layers.1": "row"}}},
    "pp=2,micro_batches=2": {"example": COMPLEX.global_batches()[0][0]},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_complex_gradients_are_clipped_by_one_norm(cluster_of: Clusters, layout: str) -> None:
    contract.check(cluster_of, COMPLEX, layout, **LAYOUTS[layout])


@pytest.mark.parametrize("norm_type", [1, 2, 3.0, math.inf])
def test_other_norms_than_the_euclidean(cluster_of: Clusters, norm_type: float) -> None:
    whole = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def clip(last: float) -> tuple[float, Tensor]:
        values = torch.cat([whole[:-1], torch.tensor([last], dtype=torch.float64)])
        share = nn.Parameter(torch.zeros_like(values.tensor_split(md.size())[md.rank()]))
        share.grad = values.tensor_split(md.size())[md.rank()].clone()
        return clipped([share], True, norm_type), share.grad

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
            check_norm_type(wrong)  # type: ignore[arg-type]


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
        norm = clipped(ours)
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
        check_max_norm("max_norm", -1)
