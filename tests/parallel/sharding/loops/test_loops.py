"""A loop of one's own in each row of the table: the contract, groups of ranks, clipping by the whole norm."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import minidist as md
from minidist import comm
from minidist.parallel.training import clipping
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.on_ranks import on_ranks
from tests.parallel.sharding.cases import CASES, check_loop, in_a_loop, own_loop

CASE = CASES["unused"]
X, Y = CASE.global_batches()[0]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def loop(
    model: Any,
    optimizer: Any,
    rank: int,
    size: int,
    clip: tuple[float, float] | None,
    zero_first: bool = False,
) -> list[float]:
    """Four steps, with two backward passes in the second, and one that is forgotten in the third."""
    own = optimizer.optimizer if isinstance(optimizer, md.FullyShard) else optimizer
    norms = []
    for step in range(4):
        x, y = X[rank::size], Y[rank::size]
        if zero_first:
            own.zero_grad(set_to_none=True)
        for again in range(1 + (step in (1, 2))):
            CASE.loss(model(x / (1 + again)), y).backward()  # type: ignore[no-untyped-call]
            if step == 2 and not again:
                own.zero_grad()
        if clip is not None and hasattr(optimizer, "clip_grad_norm"):
            norms.append(optimizer.clip_grad_norm(*clip))
        elif clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), *clip)))
        own.step()
        if not zero_first:
            own.zero_grad()
    assert clip is None or size > 1 or min(norms) < clip[0] < max(norms)
    return norms


@pytest.mark.parametrize(("zero", "ranks"), [(0, 2), (1, 1), (2, 2), (1, 3), (2, 3)])
def test_a_loop_equals_one_process(cluster_of: Clusters, zero: int, ranks: int) -> None:
    for name in ("mlp", "unused", "frozen"):
        case = replace(CASES[name], optimizer=contract.ADAMW, batches=(12, 24, 12, 8))
        for passes in (1, 2) if name != "unused" else (1,):
            for trained in cluster_of(ranks).run(own_loop, zero, case, passes):
                contract.compare(trained, contract.train_in_one_process(case))


@on_ranks(3, zero=range(4))
def test_a_group_of_ranks_trains_by_itself(zero: int) -> None:
    groups = [torch.distributed.new_group(members) for members in ([0], [1, 2])]
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, md.rank())
    group, make = groups[min(md.rank(), 1)], partial(torch.optim.SGD, lr=1.0)
    called, optimizer, state = in_a_loop(zero, model, make, group=group)
    (called(torch.ones(1, 1)) * md.rank()).sum().backward()
    optimizer.step()
    assert float(state()["weight"]) == (-0.5 if md.rank() else 0.0)


@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_optimizers_own_methods_do_at_stage_3(cluster_of: Clusters, ranks: int, zero_first: bool) -> None:
    check_loop(cluster_of(ranks), CASE.model, partial(loop, clip=None, zero_first=zero_first), sgd)


@pytest.mark.parametrize("clip", [(0.5, 2.0), (0.15, math.inf)])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_loop_of_ones_own_clips(
    cluster_of: Clusters, ranks: int, stage: int, clip: tuple[float, float]
) -> None:
    check_loop(cluster_of(ranks), CASE.model, partial(loop, clip=clip), sgd, stage)


@contract.instead_of(clipping, "global_norm")
def of_own_shards(norm: Any, gradients: Any, _: bool, *rest: Any) -> float:
    return norm(gradients, False, *rest)


def test_a_norm_of_a_ranks_own_shards_is_caught(cluster_of: Clusters) -> None:
    """A planted fault."""
    wrong = partial(contract.with_fault, of_own_shards, partial(loop, clip=(0.5, 2.0)))
    with pytest.raises((AssertionError, md.RankError), match="not close"):
        check_loop(cluster_of(2), CASE.model, wrong, sgd)


@on_ranks(2, zero=[1, 2, 3], dtype=[torch.bfloat16, torch.float16])
def test_masters_keep_what_half_precision_rounds_away(zero: int, dtype: torch.dtype) -> None:
    model = nn.Linear(5, 1, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    make = partial(torch.optim.SGD, lr=2.0**-13)
    called, optimizer, state = in_a_loop(zero, model, make, master=torch.float32)
    for _ in range(63):
        optimizer.zero_grad()
        called(torch.ones(1, 5, dtype=dtype)).sum().backward()
        optimizer.step()
    if zero == 3:
        with called.summon():
            pass  # takes nothing back, since nothing was written
        masters = [*called.parameters()]
    else:
        masters = [piece.tensor for piece in optimizer.shared.slices.all]
    assert all(each.dtype == torch.float32 for each in masters)
    own = [value for each in masters for value in each.flatten().tolist()]
    assert comm.all_reduce(torch.tensor(len(own))) == 5
    exact = 1 - 63 * 2.0**-13  # which neither dtype has
    assert own == [exact] * len(own)
    assert state()["weight"].tolist() == [[float(torch.tensor(exact).to(dtype))] * 5]


def test_what_the_optimizers_own_step_cannot_do_it_says(tmp_path: Path) -> None:
    sharded = md.FullyShard(nn.Linear(2, 2), torch.optim.SGD, lr=1.0)
    with pytest.raises(
        RuntimeError, match="the optimizer of shards takes no closure; give it to the FullyShard"
    ):
        sharded.optimizer.step(lambda: 1.0)
    sharded = md.FullyShard(nn.Linear(2, 2), torch.optim.SGD, offload=tmp_path, lr=1.0)
    with pytest.raises(RuntimeError, match=r"state lies on disk.*; call the FullyShard's step\(\)"):
        sharded.optimizer.step()


def test_gradients_that_come_after_clipping_are_refused() -> None:
    sharded, model = md.FullyShard(CASE.model(0), sgd), CASE.model(0)
    for stage in (1, 2):
        optimizer = md.ZeroOptimizer(model.parameters(), sgd, stage)
        CASE.loss(model(X), Y).backward()  # type: ignore[no-untyped-call]
        optimizer.clip_grad_norm(1.0)
        CASE.loss(model(X), Y).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="gradients came after clip_grad_norm; call it after the last"):
            optimizer.step()
    for bad in (-1, True, math.nan):
        with pytest.raises(ValueError, match="max_norm is"):
            optimizer.clip_grad_norm(bad)
        with pytest.raises(ValueError, match="max_norm is"):
            sharded.clip_grad_norm(bad)
