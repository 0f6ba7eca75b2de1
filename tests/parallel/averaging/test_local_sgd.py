"""Local SGD: with k = 1 it is data parallelism; with more it sends less, and the ranks differ in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import minidist as md
from minidist import comm
from tests.helpers import contract
from tests.helpers.models import mlp, vectors

Clusters = Callable[[int], md.Cluster]


def train(case: contract.Case, **options: int) -> tuple[contract.Trained, list[bool], int]:
    model = md.LocalSGD(case.model(md.rank()), **options)
    optimizer = case.optimizer(model.parameters())
    losses, averaged = [], []
    with comm.ledger() as ledger:
        for inputs, targets in case.global_batches():
            share = slice(*(len(inputs) * (md.rank() + i) // md.size() for i in (0, 1)))
            optimizer.zero_grad()
            loss = case.loss(model(inputs[share]), targets[share])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            averaged.append(model.synchronize())
            losses.append(float(loss.detach()))
        sent = ledger.bytes_sent
    everyones = [float(comm.all_reduce(torch.tensor(loss, dtype=torch.float64), "mean")) for loss in losses]
    return contract.Trained(everyones, model.module.state_dict()), averaged, sent


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_averaging_every_step_is_data_parallelism(cluster_of: Clusters, ranks: int, momentum: float) -> None:
    case = contract.Case(
        mlp, vectors, partial(torch.optim.SGD, lr=0.1, momentum=momentum), batches=(12, 24, 12)
    )
    for trained, averaged, sent in cluster_of(ranks).run(partial(train, case, every=1)):
        contract.compare(trained, contract.train_in_one_process(case))
        assert averaged == [True] * 3
        size = sum(8 * p.numel() for p in mlp(0).parameters())
        assert sent == 3 * (2 * (ranks - 1) * size // ranks)


def test_every_third_step_and_each_of_the_first_two(cluster_of: Clusters) -> None:
    case = contract.Case(mlp, vectors, partial(torch.optim.SGD, lr=0.1), batches=(8,) * 9)
    results = cluster_of(2).run(partial(train, case, every=3, warmup=2))
    size = sum(8 * p.numel() for p in mlp(0).parameters())
    for _, averaged, sent in results:
        assert averaged == [True, True, False, False, True, False, False, True, False]
        assert sent == 4 * size
    first, second = (trained.state for trained, _, _ in results)
    assert any(not torch.equal(first[name], second[name]) for name in first), "the ranks differ in between"


def test_without_averaging_it_is_not_one_process(cluster_of: Clusters) -> None:
    """The planted fault: a rank that never averages."""
    case = contract.Case(mlp, vectors, partial(torch.optim.SGD, lr=0.1), batches=(12, 24, 12))
    trained, _, _ = cluster_of(2).run(partial(train, case, every=100))[0]
    with pytest.raises(AssertionError, match="not close"):
        contract.compare(trained, contract.train_in_one_process(case))


def test_a_group_a_frozen_parameter_and_several_buckets(cluster_of: Clusters) -> None:
    def average() -> list[list[float]]:
        groups = [torch.distributed.new_group(members) for members in ([0, 2], [1])]
        group = groups[0] if md.rank() != 1 else groups[1]
        model = md.LocalSGD(nn.Linear(2, 1), every=1, group=group, bucket_mb=1e-6)
        model.module.bias.requires_grad_(False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(md.rank()))
        assert model.synchronize()
        return [parameter.flatten().tolist() for parameter in model.parameters()]

    assert cluster_of(3).run(average) == [[[1, 1], [0]], [[1, 1], [1]], [[1, 1], [2]]]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"every": 0}, ValueError, "every is 0; give at least 1, the steps between two averagings"),
        ({"every": 1.5}, TypeError, r"every is 1.5 \(float\); give an integer, the steps"),
        ({"warmup": -1}, ValueError, "warmup is -1; give at least 0, the steps at the start"),
    ],
)
def test_wrong_arguments(options: dict[str, int], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        md.LocalSGD(nn.Linear(1, 1), **options)
