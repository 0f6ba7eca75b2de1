"""All that a layout of data-parallel ranks can combine, held to the contract together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.refusals import refused_on_ranks
from tests.parallel.sharding.cases import CASES

GPT = CASES["gpt"]


SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.9)  # which a wrong factor on all gradients does not escape


@pytest.mark.parametrize(("ranks", "optimizer"), [(1, contract.ADAMW), (3, SGD)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_stage_with_everything_else(
    cluster_of: Clusters, zero: int, ranks: int, optimizer: Any
) -> None:
    layout = md.Layout(dp=ranks, zero=zero, micro_batches=3, recompute=True)
    contract.check(cluster_of, replace(GPT, optimizer=optimizer, clip_norm=0.3), layout)


def test_a_loss_of_parameters_that_are_cut_is_refused(cluster_of: Clusters) -> None:
    def step(term: float, **options: Any) -> float:
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        x = torch.ones(4, 4)

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            squares = sum(p.square().sum() for p in model.parameters())
            return nn.functional.mse_loss(outputs, targets) + term * squares

        engine = md.prepare(model, torch.optim.SGD, md.Layout(tp=2), loss=loss, **options)
        return engine.step(x, x[:, :3])

    told = "sees only a rank's parts of them.*the loss is .* and not"
    refused_on_ranks(cluster_of(2), ValueError, told, partial(step, 0.1, rehearse=True))
    cluster_of(2).run(partial(step, 0.1, check_loss=False))
    assert len(set(cluster_of(2).run(partial(step, 0.0, rehearse=True)))) == 1


def by_name(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """No decay for biases, norms and embeddings, as their names say; torch takes the pairs."""
    groups: list[list[Any]] = [[], []]
    for name, parameter in named_parameters:
        groups["bias" in name or "norm" in name or "token" in name].append((name, parameter))
    decays = zip(groups, (0.3, 0.0), strict=True)
    return torch.optim.AdamW([{"params": g, "weight_decay": decay} for g, decay in decays], lr=1e-2)


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=2", "dp=2,zero=3", "pp=2", "dp=2,tp=2,zero=1"])
def test_an_optimizer_function_gets_names_if_it_asks(cluster_of: Clusters, layout: str) -> None:
    def one_process(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return by_name(zip([name for name, _ in GPT.model(0).named_parameters()], parameters, strict=True))

    case = replace(GPT, optimizer=by_name)
    expected = contract.train_in_one_process(replace(GPT, optimizer=one_process))
    parsed = md.Layout.parse(layout)
    for trained in cluster_of(parsed.ranks).run(contract.train_on_this_rank, case, parsed):
        contract.compare(trained, expected)
