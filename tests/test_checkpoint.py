"""Checkpoints: what is saved comes back, bit for bit or cut anew; and a save is whole or was never there."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import contract
import numpy
import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.model import MLP

Clusters = Callable[[int], md.Cluster]
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


def vectors(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (count,), generator=generator)


def plain(seed: int) -> nn.Module:
    return MLP((6, 5, 3), seed=seed, dtype=torch.float64)


CASES = {
    "adamw": contract.Case(plain, vectors),
    "sgd": contract.Case(plain, vectors, partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "adafactor": contract.Case(plain, vectors, partial(torch.optim.Adafactor, lr=0.1)),
    "noisy": contract.Case(Noisy, vectors, batches=(12, 13, 9, 12, 8)),
}
STOP = 2
"""Steps before the save."""


def train_part(
    case: contract.Case,
    layout: md.Layout,
    path: Path,
    resume: bool,
    stop: int | None = None,
    asynchronous: bool = False,
) -> tuple[list[float], dict[str, Tensor], Any]:
    """Train `case` to step `stop`, or from the checkpoint on to the end."""
    engine = md.prepare(case.model(md.rank() + 10 * resume), case.optimizer, layout, loss=case.loss)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(engine.optimizer, [1, 2, 4], 0.5)
    random.seed(md.rank())
    numpy.random.seed(md.rank())  # noqa: NPY002
    losses, extra, saving = [], None, None
    first = 0
    if resume:
        loaded = md.load(engine, path, scheduler=scheduler)
        first, extra = loaded.step, loaded.extra
    for number, (inputs, targets) in enumerate(case.global_batches()):
        if first <= number < (99 if stop is None else stop):
            share = slice(*(len(inputs) * (engine.data_rank + i) // engine.data_ranks for i in (0, 1)))
            losses.append(engine.step(inputs[share], targets[share]))
            scheduler.step()
        if number + 1 == STOP and not resume:
            target = path if asynchronous else path.parent
            if asynchronous:
                saving = md.save(
                    engine, target, asynchronous=True, scheduler=scheduler, extra={"losses": losses}
                )
            else:
                md.save(engine, target, step=STOP, scheduler=scheduler, extra={"losses": losses})
    if saving is not None:
        assert saving.wait() == path
    return losses, engine.full_state_dict(), extra


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_same_layout_goes_on_bit_for_bit(
    cluster_of: Clusters, tmp_path: Path, name: str, ranks: int
) -> None:
    path, layout = tmp_path / f"step-{STOP:08d}", md.Layout(dp=ranks)
    whole = cluster_of(ranks).run(train_part, CASES[name], layout, path, False)
    rest = cluster_of(ranks).run(train_part, CASES[name], layout, path, True)
    for (losses, weights, _), (later, again, extra) in zip(whole, rest, strict=True):
        assert extra == {"losses": losses[:STOP]}
        assert later == losses[STOP:]
        for key, value in weights.items():
            assert torch.equal(value, again[key]), key


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 4), (4, 2), (4, 1), (1, 4)])
def test_another_number_of_ranks_goes_on(
    cluster_of: Clusters, tmp_path: Path, before: int, after: int
) -> None:
    path, case = tmp_path / f"step-{STOP:08d}", CASES["adamw"]
    whole = cluster_of(before).run(train_part, case, md.Layout(dp=before), path, False)[0]
    for losses, weights, extra in cluster_of(after).run(train_part, case, md.Layout(dp=after), path, True):
        contract.compare(contract.Trained(extra["losses"] + losses, weights), contract.Trained(*whole[:2]))
