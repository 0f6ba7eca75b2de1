"""A loop of one's own at stages 1 to 3: the optimizer's own methods, and clipping by the whole norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.parallel.training import clipping
from minidist.parallel.training.clipping import clip_grad_norm
from tests.helpers import contract
from tests.parallel.sharding import test_fully_shard as stage3
from tests.parallel.sharding import test_parameter_groups as grouped

Clusters = Callable[[int], md.Cluster]
CASE = stage3.CASES["unused"]
X, Y = CASE.global_batches()[0]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def loop(model: Any, optimizer: Any, clip: Callable[[], Any] | None, zero_first: bool = False) -> list[float]:
    """Four steps, with two backward passes in the second, and one that is forgotten in the third."""
    size, rank = (md.size(), md.rank()) if isinstance(optimizer, md.ZeroOptimizer | Owned) else (1, 0)
    norms = []
    for step in range(4):
        x, y = X[rank::size], Y[rank::size]
        if zero_first:
            optimizer.zero_grad(set_to_none=True)
        for again in range(1 + (step in (1, 2))):
            CASE.loss(model(x / (1 + again)), y).backward()  # type: ignore[no-untyped-call]
            if step == 2 and not again:
                optimizer.zero_grad()
        if clip is not None:
            norms.append(float(clip()))
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()
    return norms


class Owned:
    """A FullyShard's optimizer."""

    def __init__(self, sharded: md.FullyShard) -> None:
        self.step, self.zero_grad = sharded.optimizer.step, sharded.optimizer.zero_grad


def expected(
    clip: float | None, norm_type: float = 2.0, **options: Any
) -> tuple[dict[str, Tensor], list[float]]:
    model = CASE.model(0)
    optimizer = sgd(model.parameters())
    norm = None if clip is None else lambda: nn.utils.clip_grad_norm_(model.parameters(), clip, norm_type)
    return model.state_dict(), loop(model, optimizer, norm, **options)


@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_optimizers_own_methods_do_at_stage_3(cluster_of: Clusters, ranks: int, zero_first: bool) -> None:
    def train() -> dict[str, Tensor]:
        sharded = md.FullyShard(CASE.model(md.rank()), sgd)
        loop(sharded, Owned(sharded), None, zero_first)
        return sharded.state_dict()

    wanted, _ = expected(None, zero_first=zero_first)
    for state in cluster_of(ranks).run(train):
        compare(state, wanted)


def test_masters_reach_the_units_by_the_optimizers_own_step() -> None:
    sharded = md.FullyShard(
        nn.Linear(1, 1, bias=False).bfloat16(), torch.optim.SGD, lr=1.0, master=torch.float32
    )
    before = sharded.state_dict()["weight"]
    sharded(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    sharded.optimizer.step()
    torch.testing.assert_close(sharded.state_dict()["weight"], before - 1)


def test_what_the_optimizers_own_step_cannot_do_it_says(tmp_path: Path) -> None:
    sharded = md.FullyShard(nn.Linear(2, 2), torch.optim.SGD, lr=1.0)
    with pytest.raises(
        RuntimeError, match="the optimizer of shards takes no closure; give it to the FullyShard"
    ):
        sharded.optimizer.step(lambda: 1.0)
    sharded = md.FullyShard(nn.Linear(2, 2), torch.optim.SGD, offload=tmp_path, lr=1.0)
    with pytest.raises(RuntimeError, match=r"state lies on disk.*; call the FullyShard's step\(\)"):
        sharded.optimizer.step()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_loop_of_ones_own_clips(cluster_of: Clusters, ranks: int, stage: int, norm_type: float) -> None:
    def train() -> tuple[dict[str, Tensor], list[float]]:
        model = CASE.model(md.rank())
        if stage == 3:
            sharded = md.FullyShard(model, sgd)
            norms = loop(sharded, Owned(sharded), lambda: sharded.clip_grad_norm(limit, norm_type))
            return sharded.state_dict(), norms
        optimizer = md.ZeroOptimizer(model.parameters(), sgd, stage)
        norms = loop(model, optimizer, lambda: optimizer.clip_grad_norm(limit, norm_type))
        return model.state_dict(), norms

    limit = 0.5 if norm_type == 2 else 0.15
    wanted, norms = expected(limit, norm_type)
    assert min(norms) < limit < max(norms)
    for state, own in cluster_of(ranks).run(train):
        compare(state, wanted)
        torch.testing.assert_close(own, norms, rtol=1e-10, atol=0)


def test_clipping_again_shortens_what_is_left(cluster_of: Clusters) -> None:
    def norms(stage: int) -> list[float]:
        model = CASE.model(md.rank())
        parallel: Any = md.FullyShard(model, sgd) if stage == 3 else model
        clipper = parallel if stage == 3 else md.ZeroOptimizer(model.parameters(), sgd, stage)
        CASE.loss(parallel(X), Y).backward()  # type: ignore[no-untyped-call]
        return [clipper.clip_grad_norm(limit) for limit in (0.3, 0.1, 1.0)]

    for stage in (1, 2, 3):
        for each in cluster_of(2).run(norms, stage):
            assert each[0] > 0.3
            assert each[1:] == [pytest.approx(0.3, rel=1e-5), pytest.approx(0.1, rel=1e-5)]


def test_parameters_that_the_optimizer_leaves_out_count_in_the_norm(cluster_of: Clusters) -> None:
    case, make = grouped.CASES["left out"], grouped.some_left_out
    inputs, targets = case.global_batches()[0]

    def norm() -> float:
        sharded = md.FullyShard(case.model(md.rank()), make)
        case.loss(sharded(inputs), targets).backward()  # type: ignore[no-untyped-call]
        return sharded.clip_grad_norm(1.0)

    model = case.model(0)
    case.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    wanted = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert cluster_of(2).run(norm) == [pytest.approx(wanted, rel=1e-12)] * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_clipping_sums_the_gradients_once(cluster_of: Clusters, stage: int) -> None:
    def count() -> tuple[int, int]:
        model = CASE.model(md.rank())
        optimizer = md.ZeroOptimizer(model.parameters(), sgd, stage)
        for clips in (False, True):
            optimizer.zero_grad()
            CASE.loss(model(X), Y).backward()  # type: ignore[no-untyped-call]
            with comm.ledger() as ledger:
                if clips:
                    optimizer.clip_grad_norm(0.3)
                optimizer.step()
        optimizer.zero_grad()
        with comm.ledger() as ledger:
            CASE.loss(model(X), Y).backward()  # type: ignore[no-untyped-call]
            optimizer.clip_grad_norm(0.3)
            optimizer.step()
        return ledger.bytes_sent, optimizer.bytes_per_step()

    for sent, formula in cluster_of(2).run(count):
        assert sent == formula + 8


def test_gradients_that_are_not_there_yet_are_not_clipped_in_silence() -> None:
    sharded = md.FullyShard(CASE.model(0), sgd)
    CASE.loss(sharded(X), Y).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(
        ValueError, match="FullyShard, whose gradients are not complete; call its clip_grad_norm"
    ):
        clip_grad_norm(sharded.parameters(), 1.0, sharded=True)
    with pytest.raises(
        ValueError, match="inside a FullyShard, which get no gradients; call its clip_grad_norm"
    ):
        clip_grad_norm(sharded.module.parameters(), 1.0)
    sharded.synchronize()
    with pytest.raises(ValueError, match="shards of a FullyShard, and sharded is False; call its"):
        clip_grad_norm(sharded.parameters(), 1.0)
    assert clip_grad_norm(sharded.parameters(), 1.0, sharded=True) > 0
    model = CASE.model(0)
    for stage in (1, 2):
        optimizer = md.ZeroOptimizer(model.parameters(), sgd, stage)
        CASE.loss(model(X), Y).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(ValueError, match="a ZeroOptimizer, whose gradients here are not the sums"):
            clip_grad_norm(model.parameters(), 1.0)
        optimizer.clip_grad_norm(1.0)
        CASE.loss(model(X), Y).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="gradients came after clip_grad_norm; call it after the last"):
            optimizer.step()
    for bad in (-1, True, math.nan):
        with pytest.raises(ValueError, match="max_norm is"):
            optimizer.clip_grad_norm(bad)
        with pytest.raises(ValueError, match="max_norm is"):
            sharded.clip_grad_norm(bad)
    del optimizer
    assert clip_grad_norm(model.parameters(), 1.0) >= 0


def by_each_ranks_own(patch: pytest.MonkeyPatch) -> None:
    norm = clipping.global_norm
    patch.setattr(clipping, "global_norm", lambda grads, _, *rest: norm(grads, False, *rest))


def test_a_planted_fault_is_caught(cluster_of: Clusters) -> None:
    def train() -> list[float]:
        with pytest.MonkeyPatch.context() as patch:
            by_each_ranks_own(patch)
            sharded = md.FullyShard(CASE.model(md.rank()), sgd)
            return loop(sharded, Owned(sharded), lambda: sharded.clip_grad_norm(0.3))

    _, norms = expected(0.3)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(cluster_of(2).run(train)[0], norms)


def compare(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=contract.TOLERANCE, atol=contract.TOLERANCE)
