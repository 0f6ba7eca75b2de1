"""Checkpoints: a load restores what was saved, bit for bit or in another cut; a save is whole or absent."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.checkpoint import state_dict
from minidist.cli import train
from minidist.model import MLP
from minidist.parallel.sharding.sets import parameter_set
from minidist.parallel.sharding.units.units import Unit
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.models import mlp, vectors

Run = Callable[..., tuple[list[float], dict[str, Tensor], Any]]


class Noisy(nn.Module):
    """Random at every step (dropout), with buffers that training changes (BatchNorm), and a tied weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.last = nn.Linear(6, 3)
        self.register_buffer("empty", torch.zeros(0))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norm(self.first(x)), 0.3, self.training)
        out: Tensor = self.last(torch.relu(self.second(x)) + random.random() + numpy.random.rand())  # noqa: NPY002
        return out


BATCHES = (12, 13, 9, 12)
CASES = {
    "adamw": contract.Case(mlp, vectors, batches=BATCHES),
    "sgd": contract.Case(mlp, vectors, partial(torch.optim.SGD, lr=0.1, momentum=0.9), BATCHES),
    "adafactor": contract.Case(mlp, vectors, partial(torch.optim.Adafactor, lr=0.1), BATCHES),
    "noisy": contract.Case(Noisy, vectors, batches=BATCHES),
    "float32": contract.Case(lambda seed: MLP((6, 5, 3), seed=seed), vectors),
}
STOP = 2
"""Steps before the save."""


def train_part(
    case: contract.Case,
    layout: md.Layout,
    path: Path,
    resume: bool,
    stop: int | None = None,
) -> tuple[list[float], dict[str, Tensor], Any]:
    """Train `case` to step `stop`, or from the checkpoint on to the end."""
    engine = md.prepare(case.model(md.rank() + 10 * resume), case.optimizer, layout, loss=case.loss)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(engine.optimizer, [1, 2, 4], 0.5)
    random.seed(md.rank())
    numpy.random.seed(md.rank())  # noqa: NPY002
    losses, extra = [], None
    first = 0
    if resume:
        loaded = md.load(engine, path, scheduler=scheduler)
        first, extra = loaded.step, loaded.extra
    for number, batch in enumerate(case.global_batches()):
        if first <= number < (99 if stop is None else stop):
            losses.append(engine.step(contract.own_rows(engine, batch)))
            scheduler.step()
        if number + 1 == STOP and not resume:
            md.save(engine, path.parent, step=STOP, scheduler=scheduler, extra={"losses": losses})
    return losses, engine.full_state_dict(), extra


LAYOUTS = (
    *("dp=1", "dp=2", "dp=3", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"),
    *("dp=3,zero=1", "dp=3,zero=3", "dp=4,zero=2", "dp=4,zero=3"),
)
PARSE = md.Layout.parse


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("adamw", f"dp={ranks}") for ranks in ("2", "2,zero=1", "4,zero=2", "4,zero=3")),
        *(("noisy", f"dp={ranks}") for ranks in ("1", "3", "3,zero=1", "2,zero=2", "3,zero=3")),
        *(("sgd", f"dp={ranks}") for ranks in ("2", "2,zero=3")),
        *(("adafactor", f"dp={ranks}") for ranks in ("2", "3,zero=1")),  # stage 3 refuses it
        *(("float32", f"dp=2,zero={zero},precision=bf16") for zero in (0, 1, 3)),
        *(("float32", f"dp=2,zero={zero},precision=fp16") for zero in (0, 2, 3)),
    ],
)
def test_the_same_layout_goes_on_bit_for_bit(
    cluster_of: Clusters, tmp_path: Path, name: str, layout: str
) -> None:
    check_same_layout(cluster_of, tmp_path, CASES[name], PARSE(layout))


def check_same_layout(cluster_of: Clusters, folder: Path, case: contract.Case, layout: md.Layout) -> None:
    path, cluster = folder / f"step-{STOP:08d}", cluster_of(layout.ranks)
    whole = cluster.run(train_part, case, layout, path, False)
    rest = cluster.run(train_part, case, layout, path, True)
    for (losses, weights, _), (later, again, extra) in zip(whole, rest, strict=True):
        assert extra == {"losses": losses[:STOP]}
        assert later == losses[STOP:]
        torch.testing.assert_close(again, weights, rtol=0, atol=0)


class Backwards(nn.Module):
    """Layers are used in another order than they are registered; in float32 the order of sums shows."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(33, 33, bias=False) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        for number in (5, 6, 4, 3, 0, 1, 2):
            x = torch.tanh(self.layers[number](x))
        return x


def train_backwards(
    layout: md.Layout, path: Path, stop: int, resume: bool
) -> tuple[list[float], dict[str, Tensor], int]:
    """Three steps, saved at `stop` or resumed there; and the most buckets beyond the two that have memory."""
    more = 0
    view = parameter_set.ParameterSet.view

    def watched(self: Any, param_index: int) -> Tensor:
        nonlocal more
        found = view(self, param_index)
        more = max(more, sum(each.holds for each in self.gradients) - parameter_set.TRANSIENT)
        return found

    buckets = {"bucket_mb": 0.009}  # of two layers
    engine = md.prepare(Backwards(9 * resume), contract.ADAMW, layout, data_parallel=buckets)
    losses = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameter_set.ParameterSet, "view", watched)
        if resume:
            md.load(engine, path)
        for step in range(3):
            if step == stop and not resume:
                md.save(engine, path)
            rows = torch.Generator().manual_seed(8 * step + md.rank())
            inputs = torch.randn(5, 33, generator=rows)
            if step >= stop or not resume:
                losses.append(engine.step(inputs, torch.arange(5)))
    return losses, engine.full_state_dict(), more


@pytest.mark.parametrize(
    ("zero", "precision", "stop"),
    [(0, "fp32", 1), (1, "fp32", 0), (1, "bf16", 1), (2, "fp32", 1), (2, "bf16", 0), (2, "bf16", 1)],
)
def test_gradients_go_on_in_the_order_in_which_they_came(
    cluster_of: Clusters, tmp_path: Path, zero: int, precision: str, stop: int
) -> None:
    layout, path = md.Layout(dp=3, zero=zero, precision=precision), tmp_path / "one"
    whole = cluster_of(3).run(train_backwards, layout, path, stop, False)
    rest = cluster_of(3).run(train_backwards, layout, path, stop, True)
    for (losses, weights, before), (later, again, after) in zip(whole, rest, strict=True):
        assert later == losses[stop:]
        assert all(torch.equal(weights[name], again[name]) for name in weights)
        assert before <= 0 if zero == 2 else True
        assert after <= before


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        # Each layout once before, and once after; and some from more ranks to fewer.
        *(("adamw", before, after) for before, after in itertools.pairwise([*LAYOUTS, "dp=1"])),
        ("adamw", "dp=3", "dp=2"),
        ("adamw", "dp=3,zero=1", "dp=2,zero=3"),
        ("adamw", "dp=4,zero=2", "dp=3,zero=3"),
        ("sgd", "dp=2,zero=1", "dp=3,zero=3"),
        ("sgd", "dp=3,zero=3", "dp=2,zero=2"),
        ("adafactor", "dp=2,zero=1", "dp=3"),
        ("adafactor", "dp=3", "dp=4,zero=2"),
    ],
)
def test_another_layout_goes_on(
    cluster_of: Clusters, tmp_path: Path, name: str, before: str, after: str
) -> None:
    check_other_layout(cluster_of, tmp_path, CASES[name], PARSE(before), PARSE(after))


def load_weights(layout: md.Layout, path: Path) -> dict[str, Tensor]:
    engine = md.prepare(MLP((6, 5, 3), seed=md.rank()), contract.ADAMW, layout)
    md.load(engine, path)
    return engine.full_state_dict()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp=2", "dp=3,zero=1"),
        ("dp=2", "dp=2,zero=3"),
        ("dp=3,zero=1", "dp=2"),
        ("dp=3,zero=1", "dp=4,zero=2"),
        ("dp=2,zero=3", "dp=2"),
        ("dp=2,zero=3", "dp=4,zero=2"),
    ],
)
def test_masters_come_back_in_another_layout(
    cluster_of: Clusters, tmp_path: Path, before: str, after: str
) -> None:
    path = tmp_path / f"step-{STOP:08d}"
    written, read = (PARSE(f"{layout},precision=bf16") for layout in (before, after))
    cluster_of(written.ranks).run(train_part, CASES["float32"], written, path, False, STOP)
    masters = state_dict(path)
    for weights in cluster_of(read.ranks).run(load_weights, read, path):
        for name, master in masters.items():
            assert master.dtype == torch.float32
            assert torch.equal(weights[name], master.bfloat16()), name


def export_and_watch(layout: md.Layout, path: Path) -> tuple[dict[str, Tensor], list[str], int]:
    """What the engine has, its names in order, and the most units that were gathered at a time."""
    case, most, gathered = CASES["noisy"], 0, set()
    ends = nn.Linear(6, 6).double(), nn.Linear(3, 3).double()
    model = nn.Sequential(ends[0], case.model(md.rank()), ends[1])
    engine = md.prepare(model, case.optimizer, layout, loss=case.loss)
    inputs, targets = case.global_batches()[0]
    engine.step(inputs[md.rank() :: md.size()], targets[md.rank() :: md.size()])
    gather, free = Unit.gather, Unit.free

    def watched(self: Unit, *arguments: Any) -> None:
        nonlocal most
        gathered.add(self.number)
        most = max(most, len(gathered))
        gather(self, *arguments)

    def freed(self: Unit) -> None:
        gathered.discard(self.number)
        free(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "gather", watched)
        patch.setattr(Unit, "free", freed)
        md.export(engine, path)
        fingerprint = train._fingerprint(engine.whole())
    assert fingerprint == train._fingerprint(engine.whole())
    state = engine.full_state_dict()
    torch.testing.assert_close(dict(engine.whole()), state, rtol=0, atol=0)
    return state, [*engine.model.state_dict()], most


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_an_export_gathers_one_unit_at_a_time(cluster_of: Clusters, tmp_path: Path, zero: int) -> None:
    path = tmp_path / "model.pt"
    (state, names, most), _ = cluster_of(2).run(export_and_watch, md.Layout(dp=2, zero=zero), path)
    exported = torch.load(path, weights_only=True)
    assert [*exported] == names
    assert most == (zero == 3)
    torch.testing.assert_close(exported, state, rtol=0, atol=0)


def check_other_layout(
    cluster_of: Clusters, folder: Path, case: contract.Case, before: md.Layout, after: md.Layout
) -> None:
    path = folder / f"step-{STOP:08d}"
    whole = cluster_of(before.ranks).run(train_part, case, before, path, False)[0]
    for losses, weights, extra in cluster_of(after.ranks).run(train_part, case, after, path, True):
        contract.compare(contract.Trained(extra["losses"] + losses, weights), contract.Trained(*whole[:2]))
