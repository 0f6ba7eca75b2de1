"""Master weights: small updates count, and everything that goes by an optimizer goes by the masters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.model import MLP
from minidist.model.loss import cross_entropy
from minidist.parallel.contract.residency import DATA_PARALLEL
from minidist.parallel.sharding.loops import zero
from minidist.parallel.sharding.sharded import Sharded
from minidist.parallel.sharding.share_model import share_model
from minidist.parallel.training import master_weights
from minidist.parallel.training.precision import Precision
from tests.conftest import Clusters


def half(seed: int = 0) -> nn.Module:
    return MLP((6, 5, 3), seed=seed, dtype=torch.float32).bfloat16()


def learn(model: nn.Module, optimizer: Any, steps: int = 1, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs = torch.randn(8, 6, generator=generator).bfloat16()
        optimizer.zero_grad()
        cross_entropy(model(inputs), torch.arange(8) % 3).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def shared(model: nn.Module, make: Any) -> Sharded:
    return share_model(model, make, DATA_PARALLEL, master=torch.float32)


def test_it_is_the_optimizer_in_float32_and_a_rounding() -> None:
    model, exact = half(), half().float()
    strategy = shared(model, partial(torch.optim.AdamW, lr=0.1))
    theirs = torch.optim.AdamW(exact.parameters(), lr=0.1)
    for step in range(5):
        learn(model, SimpleNamespace(zero_grad=strategy.zero_grad, step=strategy.update), seed=step)
        for ours, parameter in zip(model.parameters(), exact.parameters(), strict=True):
            assert ours.grad is not None
            parameter.grad = ours.grad.float()
        theirs.step()
        for ours, parameter in zip(model.parameters(), exact.parameters(), strict=True):
            assert torch.equal(ours, parameter.bfloat16())
    assert all(master.grad is None for master in strategy.slices.masters())  # not held between steps


def test_an_optimizer_of_other_parameters() -> None:
    model = half()
    with pytest.raises(ValueError, match="did not use the parameters that it was called with"):
        shared(model, lambda _: torch.optim.SGD(model.parameters(), lr=0.1))


def test_sixteen_bytes_a_parameter() -> None:
    model = MLP((6, 5, 3), dtype=torch.float32)
    elements = sum(parameter.numel() for parameter in model.parameters())
    precision = Precision("bf16")
    precision.convert(model)
    strategy = share_model(model, partial(torch.optim.AdamW, lr=0.1), DATA_PARALLEL, master=precision.master)
    learn(model, SimpleNamespace(zero_grad=strategy.zero_grad, step=strategy.update))
    held = strategy.held()

    def bytes_of(tensors: Any) -> int:
        return sum(tensor.nbytes for tensor in tensors if tensor.dim())  # Adam counts steps in a scalar

    assert bytes_of(held.parameters) == bytes_of(held.gradients) == 2 * elements
    assert bytes_of(held.optimizer) == 12 * elements


class ScheduleFree(torch.optim.Optimizer):
    """As in Defazio et al. 2024: the parameters hold y in training, and the averages x in evaluation."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.5, beta: float = 0.6) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0, "trains": False})

    def train(self) -> None:
        self._move(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._move(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _move(self, trains: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["trains"] != trains else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight(group["beta"]))
            group["trains"] = trains

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("call train() before step()")
            group["steps"] += 1
            weight = 1 / group["steps"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    z = self.state[parameter].setdefault("z", parameter.detach().clone())
                    parameter.lerp_(z, weight)
                    parameter.add_(parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                    z.sub_(parameter.grad, alpha=group["lr"])


def schedule_free(
    dtype: torch.dtype, layout: md.Layout | None = None, rehearse: bool = False
) -> list[dict[str, Tensor]]:
    """The weights of each evaluation: of plain torch, or of an engine in a layout."""
    model, found = MLP((6, 5, 3), seed=md.rank() if layout else 0, dtype=dtype), []
    optimizer: Any
    if layout:
        engine = md.prepare(model, ScheduleFree, layout, rehearse=rehearse)
        optimizer = engine.optimizer
    else:
        optimizer = ScheduleFree(model.parameters())
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.train()
        for _ in range(2):
            inputs, targets = torch.randn(8, 6, generator=draw, dtype=dtype), torch.arange(8) % 3
            if layout:
                own = slice(engine.data_rank, None, engine.data_ranks)
                engine.step(inputs[own], targets[own])
            else:
                optimizer.zero_grad()
                cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        optimizer.eval()
        found.append(
            engine.full_state_dict() if layout else {k: v.clone() for k, v in model.state_dict().items()}
        )
    return found


@pytest.mark.parametrize(
    "layout",
    [
        *(md.Layout(dp=2, zero=stage) for stage in (0, 1, 2, 3)),
        md.Layout(dp=4, zero=3, shard=2),
        md.Layout(pp=2, micro_batches=2),
        md.Layout(dp=2, tp=2, zero=1),
    ],
    ids=str,
)
def test_an_optimizers_own_methods_work_in_each_layout(cluster_of: Clusters, layout: md.Layout) -> None:
    expected = schedule_free(torch.float64)
    for found in cluster_of(layout.ranks).run(schedule_free, torch.float64, layout, layout.dp > 1):
        for ours, theirs in zip(found, expected, strict=True):
            for name, wanted in theirs.items():
                torch.testing.assert_close(ours[name], wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_own_methods_change_in_masters_reaches_the_model(
    cluster_of: Clusters, stage: int, fault: bool
) -> None:
    """In bf16. The planted fault: nothing follows after a method."""
    layout = md.Layout(dp=2, zero=stage, precision="bf16")

    def train() -> list[dict[str, Tensor]]:
        with pytest.MonkeyPatch.context() as patch:
            for module in (zero, master_weights) if fault else ():
                patch.setattr(module, "own_attribute", lambda of, name, then: getattr(of, name))
            return schedule_free(torch.float32, layout)

    ((first, *_), _) = cluster_of(2).run(train)
    wanted = schedule_free(torch.float32)[0]
    error = max(float((first[name] - value).abs().max()) for name, value in wanted.items())
    assert (error > 0.005) == fault, error
