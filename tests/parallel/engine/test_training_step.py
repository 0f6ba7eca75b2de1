"""All that a layout of data-parallel ranks can combine, held to the contract together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from tests.helpers import contract
from tests.parallel.sharding.test_data_parallel import CASES

Clusters = Callable[[int], md.Cluster]
GPT = CASES["gpt"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_stage_with_everything_else(cluster_of: Clusters, zero: int, ranks: int) -> None:
    layout = md.Layout(dp=ranks, zero=zero, micro_batches=3, recompute=True)
    contract.check(cluster_of(ranks), replace(GPT, clip_norm=0.5), layout)


def test_evaluation_leaves_every_module_in_its_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model[1].eval()  # frozen statistics
    engine = md.prepare(model, torch.optim.SGD, loss=nn.functional.mse_loss)
    x = torch.randn(3, 4)

    def metric(outputs: Tensor, _: Tensor) -> Tensor:
        assert not any(module.training for module in model.modules())
        raise ArithmeticError

    engine.evaluate(x, x)
    with pytest.raises(ArithmeticError):
        engine.evaluate(x, x, metric)
    assert [module.training for module in model.modules()] == [True, True, False, True]
