"""Parameter groups over flat shards: what a function forms of parameters counts, and moves between stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.parallel.sharding import parameter_groups
from tests.helpers import contract
from tests.parallel.sharding import test_fully_shard as stage3
from tests.parallel.sharding import test_zero as zero

Clusters = Callable[[int], md.Cluster]
GROUPED = replace(stage3.CASES["unused"], optimizer=zero.in_groups)


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
    "gpt": replace(stage3.CASES["gpt"], optimizer=zero.in_groups),
    "frozen": replace(stage3.CASES["frozen"], optimizer=zero.in_groups),
    "odd": replace(stage3.CASES["odd"], optimizer=zero.in_groups),
    "left out": replace(stage3.CASES["mlp"], optimizer=some_left_out),
    "one's own": replace(stage3.CASES["mlp"], optimizer=partial(Halved, lr=0.2)),
    "with state": replace(stage3.CASES["mlp"], optimizer=adagrads),
}


@pytest.mark.parametrize(("name", "ranks"), [*((name, 3) for name in CASES), ("unused", 1), ("gpt", 2)])
def test_groups_equal_one_process(cluster_of: Clusters, name: str, ranks: int) -> None:
    contract.check(cluster_of(ranks), CASES[name], md.Layout(dp=ranks, zero=3, micro_batches=2))


def test_what_is_left_out_stays(cluster_of: Clusters) -> None:
    def train() -> list[str]:
        case = CASES["left out"]
        trained = contract.train_on_this_rank(case, md.Layout(dp=md.size(), zero=3))
        return [name for name, v in case.model(0).state_dict().items() if torch.equal(v, trained.state[name])]

    assert len(cluster_of(2).run(train)[0]) == 1


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


# Each way, and each case away from stage 3 and to it.
@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (3, 0, "unused"),
        (3, 1, "left out"),
        (3, 3, "with state"),
        (0, 3, "left out"),
        (1, 3, "unused"),
        (3, 1, "with state"),
        (1, 3, "with state"),
        (3, 3, "left out"),
    ],
)
def test_groups_move_between_stages(
    cluster_of: Clusters, tmp_path: Path, name: str, before: int, after: int
) -> None:
    case = replace(CASES[name], batches=(12, 13, 7, 12))
    batches = case.global_batches()
    path = str(tmp_path / "saved")

    def train(zero: int, ranks: int, first: bool) -> tuple[list[float], dict[str, Tensor], list[float]]:
        engine = md.prepare(
            case.model(md.rank() + 5 * (not first)), case.optimizer, md.Layout(dp=ranks, zero=zero)
        )
        if not first:
            md.load(engine, path)
        losses = []
        for inputs, targets in batches[:3] if first else batches[3:]:
            share = slice(*(len(inputs) * (md.rank() + i) // ranks for i in (0, 1)))
            losses.append(engine.step(inputs[share], targets[share]))
        if first:
            md.save(engine, path)
        return losses, engine.full_state_dict(), [g["lr"] for g in engine.optimizer.param_groups]

    expected = contract.train_in_one_process(case)
    rates = cluster_of(2).run(train, before, 2, True)[0][2]
    for losses, state, now in cluster_of(3).run(train, after, 3, False):
        contract.compare(
            contract.Trained(losses, state), contract.Trained(expected.losses[3:], expected.state)
        )
        assert now == rates


def test_other_groups_than_the_saved_are_refused(tmp_path: Path) -> None:
    engine = md.prepare(GROUPED.model(0), GROUPED.optimizer, md.Layout(zero=3))
    md.save(engine, str(tmp_path / "saved"))
    other = md.prepare(GROUPED.model(0), contract.ADAMW, md.Layout(zero=3))
    with pytest.raises(ValueError, match=r"the optimizer has 1 groups of .* and the saved one 2 of"):
        md.load(other, str(tmp_path / "saved"))


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


def test_the_contract_catches_a_planted_fault() -> None:
    """All in the first group."""
    expected = contract.train_in_one_process(GROUPED)
    with pytest.MonkeyPatch.context() as patch:
        hand_over = parameter_groups.FlatParameterGroups.hand_over
        patch.setattr(
            parameter_groups.FlatParameterGroups,
            "hand_over",
            lambda s, p: hand_over(s, [(0, q) for _, q in p]),
        )
        with pytest.raises(AssertionError, match="not close"):
            contract.compare(contract.train_on_this_rank(GROUPED, md.Layout(zero=3)), expected)
