"""BatchNorm: over all ranks' rows as in one process, or each rank's own, averaged before they are read."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.refusals import refuses

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def convolutions(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    # No biases before a BatchNorm, as in ResNets: their gradients are 0, and Adam would magnify rounding.
    return nn.Sequential(
        nn.Conv1d(3, 4, 3, bias=False, dtype=torch.float64),
        nn.BatchNorm1d(4, dtype=torch.float64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 6, bias=False, dtype=torch.float64),
        nn.BatchNorm1d(6, momentum=None, affine=False, dtype=torch.float64),
        nn.Linear(6, 5, dtype=torch.float64),
    )


def images(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    inputs = 3 + torch.randn(count, 3, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(5, (count,), generator=generator)


CASE = contract.Case(convolutions, images)


@pytest.mark.parametrize(
    "layout",
    ["dp=1", "dp=2", "dp=3", "dp=2,zero=1", "dp=3,zero=2", "dp=2,zero=3", "dp=2,recompute=true"],
)
def test_synchronized_statistics_are_those_of_one_process(cluster_of: Clusters, layout: str) -> None:
    contract.check(cluster_of, CASE, layout, batch_norm="synchronized")


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=2", "dp=2,zero=3"])
def test_rows_that_do_not_count_are_in_no_statistics(cluster_of: Clusters, layout: str) -> None:
    """In each list rank 0 has two batches and rank 1 one. A planted fault: that one counts twice."""
    first, second = (images(torch.Generator().manual_seed(seed), 9) for seed in (1, 2))

    def own(batch: tuple[Tensor, Tensor], rows: slice) -> tuple[Tensor, Tensor]:
        return batch[0][rows], batch[1][rows]

    def train(fault: bool) -> dict[str, Tensor]:
        options: dict[str, Any] = {"batch_norm": "synchronized", "rehearse": not fault}
        engine = md.prepare(convolutions(md.rank()), SGD, md.Layout.parse(layout), **options)
        if fault:
            engine.executor.announce = lambda _: None  # type: ignore[method-assign]
        for _ in range(2):
            mine = [own(first, slice(4)), second] if md.rank() == 0 else [own(first, slice(4, None))]
            engine.step(mine)
        return engine.full_state_dict()

    def loss(model: nn.Module, _: object) -> Tensor:
        return sum(nn.functional.cross_entropy(model(x), y) / 2 for x, y in (first, second))  # type: ignore[return-value]

    model = convolutions(0)
    contract.plain_steps(model, SGD(model.parameters()), range(2), loss)
    for state in cluster_of(2).run(train, False):
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-10, atol=1e-10)
    wrong = cluster_of(2).run(train, True)[0]["1.running_mean"]
    assert not torch.allclose(wrong, model.state_dict()["1.running_mean"], rtol=1e-3)


class SomeRanks(nn.Module):
    """A layer that rank 0's rows do not use after the first step, as an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.expert = 0, nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.expert(x) if md.rank() or self.passes == 1 else x


@pytest.mark.parametrize("layout", ["dp=2,zero=2", "dp=4,zero=1,shard=2", "dp=4,zero=2,shard=2"])
def test_ranks_that_use_other_layers_do_not_wait_for_each_other(cluster_of: Clusters, layout: str) -> None:
    """Rank 0 sends no gradient behind the expert's before its backward pass ends, and all meet in it.

    A planted fault, by hand: without `GradientComm.waits_in_backward` this does not end.
    """
    parsed = md.Layout.parse(layout)

    def train() -> list[float]:
        torch.manual_seed(md.rank())
        linear = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(5)]
        first = [linear[0], nn.BatchNorm1d(4, dtype=torch.float64)]
        model = nn.Sequential(*first, *linear[1:4], SomeRanks(), linear[4])
        small: Any = {"data_parallel": {"bucket_mb": 0}, "batch_norm": "synchronized"}
        engine = md.prepare(model, SGD, parsed, nn.functional.cross_entropy, **small)
        x, y = torch.randn(3, 4, dtype=torch.float64), torch.arange(3)
        return [engine.step(x, y) for _ in range(3)]

    found = cluster_of(parsed.ranks).run(train)
    assert all(losses == found[0] and losses[2] < losses[0] for losses in found)


def test_gradients_by_the_inputs_are_exact_too(cluster_of: Clusters) -> None:
    """With a row on rank 0 and four on rank 1, which alone cannot be seen in parameters' sums."""
    x, y = images(torch.Generator().manual_seed(1), 5)
    alone = x.clone().requires_grad_()
    nn.functional.cross_entropy(convolutions(0)(alone), y, reduction="sum").backward()  # type: ignore[no-untyped-call]

    def by_rows() -> Tensor:
        from minidist.parallel.training.batch_norm import synchronize

        model, rows = convolutions(0), slice(0, 1) if md.rank() == 0 else slice(1, 5)
        synchronize(model, None)
        own = x[rows].clone().requires_grad_()
        nn.functional.cross_entropy(copy.deepcopy(model)(own), y[rows], reduction="sum").backward()  # type: ignore[no-untyped-call]
        assert own.grad is not None
        return own.grad

    torch.testing.assert_close(torch.cat(cluster_of(2).run(by_rows)), alone.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("zero", [0, 3])
def test_own_statistics_agree_before_they_are_read(cluster_of: Clusters, zero: int) -> None:
    def trained() -> tuple[Tensor, list[Tensor], float]:
        engine = md.prepare(convolutions(0), contract.ADAMW, md.Layout(dp=2, zero=zero))
        for inputs, targets in CASE.global_batches():
            engine.step(inputs[md.rank() :: 2], targets[md.rank() :: 2])
        norm = engine.model[1]
        own, read = norm.running_var.clone(), []
        value = engine.evaluate(inputs[md.rank() :: 2], targets[md.rank() :: 2])
        read.append(norm.running_var.clone())
        norm.running_var.add_(md.rank())
        read.append(engine.full_state_dict()["1.running_var"])
        return own, read, value

    (own, read, value), (other, others_read, _) = cluster_of(2).run(trained)
    assert not torch.equal(own, other)
    mean = (own + other) / 2
    for found in (read, others_read):
        torch.testing.assert_close(found[0], mean, rtol=1e-14, atol=0)
        torch.testing.assert_close(found[1], mean + 0.5, rtol=1e-14, atol=0)
    assert value > 0


NORM = nn.BatchNorm1d(2)
test_refusals = refuses(
    lambda model, layout=None, batch_norm="synchronized": md.prepare(
        model, contract.ADAMW, layout, batch_norm=batch_norm
    ),
    ({"model": NORM, "batch_norm": "sync"}, "batch_norm is 'sync'; give 'synchronized', or None"),
    ({"model": nn.Linear(2, 2)}, "the model has no BatchNorm to synchronize"),
    (
        {"model": nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False))},
        "^0 keeps no running statistics",
    ),
    ({"model": NORM, "layout": md.Layout(micro_batches=2)}, "micro_batches=2 and pp=1, where a Batch"),
)


def test_one_value_a_channel_is_refused() -> None:
    engine = md.prepare(nn.BatchNorm1d(2), contract.ADAMW, batch_norm="synchronized")
    with pytest.raises(
        ValueError, match="a BatchNorm got 1 values per channel from all ranks; give at least 2"
    ):
        engine.step(torch.ones(1, 2), torch.zeros(1, dtype=torch.int64))
