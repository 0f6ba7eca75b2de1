"""The state of training moves between rows of the table, between numbers of ranks, and to plain training."""

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
from minidist.comm.mesh import Mesh
from minidist.parallel.contract.residency import ROWS
from minidist.parallel.engine.partition_model import partition_model
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.sharding.optimizer import optimizer_slices
from minidist.parallel.sharding.share_model import share_model
from minidist.parallel.training.precision import Precision
from tests.helpers import contract
from tests.parallel.sharding.cases import CASES, OPTIM, SMALL, to_update
from tests.parallel.sharding.optimizer.test_parameter_groups import CASES as GROUPS
from tests.parallel.sharding.optimizer.test_parameter_groups import GROUPED

Clusters = Callable[[int], md.Cluster]
Where = tuple[int, int]  # a row of the table, and ranks


class Narrow(nn.Module):
    """A model of the contract in float32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.float()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x.float()).double()


def box_of(box: Any) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.tensor.shape, strict=True))


def put_together(
    boxes: list[tuple[str, tuple[int, ...], tuple[slice, ...], Tensor]], once: bool
) -> dict[str, Tensor]:
    """The whole state. once: each element of a tensor lies on one rank alone."""
    whole: dict[str, Tensor] = {}
    count: dict[str, Tensor] = {}
    for name, shape, box, tensor in boxes:
        whole.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))[box] = tensor
        count.setdefault(name, torch.zeros(shape))[box] += 1
    assert all((each > 0).all() for each in count.values()), "something lies on no rank"
    assert not once or all((each == 1).all() for each in count.values() if each.dim())
    return whole


WAYS: list[tuple[Where, Where]] = [((1, 3), (2, 2)), ((1, 3), (0, 1)), ((0, 1), (2, 3))]
UNITS: list[tuple[Where, Where]] = [((3, 3), (3, 2)), ((3, 2), (0, 2)), ((0, 2), (3, 3))]
MASTERS: list[tuple[Where, Where]] = [((1, 3), (2, 2)), ((2, 2), (1, 3)), ((2, 2), (0, 2))]


@pytest.mark.parametrize(
    ("name", "master", "ways"),
    [
        *((name, None, WAYS) for name in ("unused", "tied", "adafactor", "frozen")),
        *((name, torch.float64, MASTERS) for name in ("unused", "tied", "adafactor", "frozen")),
        ("unused", None, UNITS),
    ],
    ids=str,
)
def test_any_layout_goes_on_from_the_chunks_of_another(
    cluster_of: Clusters, name: str, master: torch.dtype | None, ways: list[tuple[Where, Where]]
) -> None:
    case = replace(CASES[name], batches=(12, 13, 7, 12, 5))
    if master is not None:
        build = case.model
        case = replace(case, model=lambda seed: Narrow(build(seed)))
    batches = case.global_batches()

    def make(zero: int, seed: int) -> Any:
        model, layout = case.model(seed), md.Layout(dp=md.size(), zero=zero)
        if master is None:
            options = SMALL if zero in (1, 2) else None
            return md.prepare(model, case.optimizer, layout, loss=case.loss, data_parallel=options)
        sharded = share_model(model, case.optimizer, ROWS[zero], SMALL, master)
        part = partition_model(model, layout, Mesh(dp=md.size()))
        return Engine(part, sharded, layout, case.loss, Precision("fp32"))

    def save(zero: int) -> Any:
        engine = make(zero, md.rank())
        with pytest.MonkeyPatch.context() as patch:
            if name == "unused":
                patch.setattr(optimizer_slices, "SLICE_BYTES", 5 * 8)
            contract.steps(engine, batches[:3])
            boxes = [(c.name, c.shape, box_of(c), c.tensor.clone()) for c in engine.strategy.state_boxes()]
            settings = engine.strategy.settings()
            return boxes, settings, contract.steps(engine, batches[3:])

    def load(zero: int, whole: dict[str, Tensor], settings: Any) -> contract.Trained:
        engine = make(zero, 9)
        state: dict[str, dict[str, Any]] = {}
        for full, value in whole.items():
            if full.startswith("optimizer."):
                parameter, _, key = full.removeprefix("optimizer.").rpartition(".")
                state.setdefault(parameter, {})[key] = (tuple(value.shape), value.dtype)
        engine.strategy.load_settings(settings, state)
        with torch.no_grad():
            for box in engine.strategy.state_boxes():
                box.tensor.copy_(whole[box.name][box_of(box)])
        engine.strategy.loaded()
        return contract.steps(engine, batches[3:])

    expected = contract.train_in_one_process(case)
    for (zero, ranks), (zero_after, ranks_after) in ways:
        saved = cluster_of(ranks).run(save, zero)
        whole = put_together([box for boxes, _, _ in saved for box in boxes], once=zero == 3)
        wanted = saved[0][2]
        if master is None:
            wanted = contract.Trained(expected.losses[3:], expected.state)
            contract.compare(saved[0][2], wanted)
        for trained in cluster_of(ranks_after).run(load, zero_after, whole, saved[0][1]):
            if master is None:
                contract.compare(trained, wanted)
            else:  # another sum of gradients in float32
                torch.testing.assert_close(trained.state, wanted.state, rtol=1e-6, atol=1e-6)


class CountsInATensor(OPTIM.SGD):
    """One's own, whose count of steps is a tensor of one element."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter, state, lr in to_update(self):
            count = state.setdefault("step", torch.zeros(1)).add_(1)
            mean = state.setdefault("mean", torch.zeros_like(parameter)).add_(parameter.grad)
            parameter.sub_(mean / float(count), alpha=lr)


def test_a_parameter_frozen_before_the_first_step_and_a_count_of_ones_own_are_saved(
    cluster_of: Clusters, tmp_path: Path
) -> None:
    def train() -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.ones(2, 4)
        make = partial(CountsInATensor, lr=0.1)
        buckets = {"bucket_mb": 0}
        layout, loss = md.Layout(dp=2, zero=1), nn.functional.mse_loss
        engine = md.prepare(model, make, layout, loss, data_parallel=buckets)
        model[2].weight.requires_grad_(False)
        engine.step(x, x)
        md.save(engine, tmp_path / "saved")
        after = [engine.step(x, x) for _ in range(2)]
        md.load(engine, tmp_path / "saved")
        return after, [engine.step(x, x) for _ in range(2)]

    for after, again in cluster_of(2).run(train):
        assert after == again


@pytest.mark.parametrize("zero", [1, 2])
def test_a_model_computes_with_masters_that_were_loaded_before_any_backward_pass(
    cluster_of: Clusters, tmp_path: Path, zero: int
) -> None:
    def load() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        layout = md.Layout(dp=2, zero=zero, precision="bf16")
        saved, loaded = (
            md.prepare(nn.Linear(3, 2), partial(OPTIM.AdamW, lr=0.1), layout, nn.functional.mse_loss)
            for _ in range(2)
        )
        md.save(saved, tmp_path / "saved")
        md.load(loaded, tmp_path / "saved")
        return saved.full_state_dict(), dict(loaded.model.named_parameters())

    for wanted, found in cluster_of(2).run(load):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, check_dtype=False)


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
    case = replace(GROUPS[name], batches=(12, 13, 7, 12))
    batches = case.global_batches()
    path = str(tmp_path / "saved")

    def train(zero: int, ranks: int, first: bool) -> tuple[contract.Trained, list[float]]:
        layout = md.Layout(dp=ranks, zero=zero)
        engine = md.prepare(case.model(md.rank() + 5 * (not first)), case.optimizer, layout)
        if not first:
            md.load(engine, path)
        trained = contract.steps(engine, batches[:3] if first else batches[3:])
        if first:
            md.save(engine, path)
        return trained, [g["lr"] for g in engine.optimizer.param_groups]

    expected = contract.train_in_one_process(case)
    rates = cluster_of(2).run(train, before, 2, True)[0][1]
    for trained, now in cluster_of(3).run(train, after, 3, False):
        contract.compare(trained, contract.Trained(expected.losses[3:], expected.state))
        assert now == rates


def test_other_groups_than_the_saved_are_refused(tmp_path: Path) -> None:
    engine = md.prepare(GROUPED.model(0), GROUPED.optimizer, md.Layout(zero=3))
    md.save(engine, str(tmp_path / "saved"))
    other = md.prepare(GROUPED.model(0), contract.ADAMW, md.Layout(zero=3))
    with pytest.raises(ValueError, match=r"the optimizer has 1 groups of .* and the saved one 2 of"):
        md.load(other, str(tmp_path / "saved"))
