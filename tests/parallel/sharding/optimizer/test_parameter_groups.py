"""Parameter groups over flat shards: what a function forms of parameters counts, and moves between stages."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from tests.conftest import Clusters
from tests.parallel.sharding.cases import ALL, in_groups

GROUPED = replace(ALL["unused"], optimizer=in_groups)


def some_left_out(parameters: Any) -> torch.optim.Optimizer:
    """Every third one is trained by nobody; the groups take turns."""
    each = [p for i, p in enumerate(parameters) if i % 3 != 1]
    groups = [{"params": each[::2], "momentum": 0.9}, {"params": each[1::2], "lr": 0.05}]
    return torch.optim.SGD(groups, lr=0.2)


class Halved(torch.optim.SGD):
    """One's own, which halves the rate of vectors."""

    elementwise = True

    def __init__(self, params: Any, lr: float) -> None:
        each = [*params]
        if isinstance(each[0], dict):
            super().__init__(each, lr)
            return
        few = [
            {"params": [p for p in each if (p.dim() > 1) == many], "lr": lr / (2 - many)} for many in (0, 1)
        ]
        super().__init__(few, lr)


def adagrads(parameters: Any) -> torch.optim.Optimizer:
    """State before the first step, of another value in each group."""
    each = [*parameters]
    groups = [{"params": each[:3], "initial_accumulator_value": 0.1}, {"params": each[3:]}]
    return torch.optim.Adagrad(groups, lr=0.1)


CASES = {
    "unused": GROUPED,
    "gpt": replace(ALL["gpt"], optimizer=in_groups),
    "frozen": replace(ALL["frozen"], optimizer=in_groups),
    "odd": replace(ALL["odd"], optimizer=in_groups),
    "left out": replace(ALL["mlp"], optimizer=some_left_out),
    "one's own": replace(ALL["mlp"], optimizer=partial(Halved, lr=0.2)),
    "with state": replace(ALL["mlp"], optimizer=adagrads),
}


@pytest.mark.parametrize("master", [None, torch.float64])
def test_a_function_may_look_at_the_model(cluster_of: Clusters, master: torch.dtype | None) -> None:
    """It forms groups by names, of parameters that it does not take from its argument."""

    def rates(model: nn.Module, only: Any = None) -> torch.optim.Optimizer:
        named = [*model.named_parameters()]
        return torch.optim.SGD(
            [
                {"params": [p for name, p in named if "bias" in name], "lr": 0.5},
                {"params": [p for name, p in named if "bias" not in name]},
            ],
            lr=0.1,
        )

    def train() -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        sharded = md.FullyShard(model, partial(rates, model), master=master)
        sharded(torch.ones(2, 6)).sum().backward()
        sharded.step()
        return sharded.state_dict()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    optimizer = rates(model)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    for state in cluster_of(2).run(train):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value)


def test_what_cannot_be_mapped_is_refused() -> None:
    class Beginning(torch.optim.SGD):
        elementwise = True

        def __init__(self, params: Any, secret: int) -> None:
            super().__init__(params, lr=0.1)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter] = {"sum": torch.zeros_like(parameter)}

    model = nn.Linear(2, 2)
    stranger = nn.Parameter(torch.zeros(7))
    with pytest.raises(ValueError, match=r"a parameter of shape \(7,\) that is not the module's; make it of"):
        md.FullyShard(model, lambda p: torch.optim.SGD([*p, stranger], lr=0.1))
    assert not model.weight.isnan().any()
    with pytest.raises(
        ValueError, match="a Beginning that has state before its first step, and stage 3 cannot"
    ):
        md.FullyShard(model, lambda p: Beginning(p, 3))
