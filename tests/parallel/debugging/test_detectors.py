"""`detect` finds a planted mistake in torch's DDP, FSDP2 and tensor parallelism, and nothing without it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from minidist.parallel.debugging.detectors import DETECTORS, LONG, MakeOptimizer, Run, Subject, detect
from tests.conftest import Clusters

CHEAP = {name: detector for name, detector in DETECTORS.items() if name != "loss"}
Trained = tuple[list[float], dict[str, Tensor]]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).double()


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, rank: int = 0, ranks: int = 1
) -> list[float]:
    """The loop that all share: this rank's rows, and the mean of the ranks' losses."""
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        x, y = (torch.randn(6, width, generator=generator).double().chunk(ranks)[rank] for width in (8, 4))
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def alone(make: MakeOptimizer, steps: int) -> Trained:
    model = net()
    return loop(model, make(model.parameters()), steps), dict(model.named_parameters())


def whole(losses: list[float], model: nn.Module) -> Trained:
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    parameters = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.named_parameters()}
    return (mean / dist.get_world_size()).tolist(), parameters


def ddp(mistake: bool, make: MakeOptimizer, steps: int) -> Trained:
    """Planted: a head that DDP does not know of, as one that is added after wrapping."""
    model = net()
    wrapped: Any = DistributedDataParallel(model[:2] if mistake else model)
    both = nn.Sequential(wrapped, model[2]) if mistake else wrapped
    losses = loop(both, make(model.parameters()), steps, dist.get_rank(), dist.get_world_size())
    return whole(losses, model)


def fsdp2(mistake: bool, make: MakeOptimizer, steps: int) -> Trained:
    """Planted: the optimizer is made before the parameters are sharded, and holds those of before."""
    model, mesh = net(), init_device_mesh("cpu", (dist.get_world_size(),))
    early = make(model.parameters()) if mistake else None
    fully_shard(model, mesh=mesh)
    optimizer = early or make(model.parameters())
    return whole(loop(model, optimizer, steps, dist.get_rank(), dist.get_world_size()), model)


def tensor_parallel(mistake: bool, make: MakeOptimizer, steps: int) -> Trained:
    """Planted: the partial sums of the second layer are used as the whole."""
    last = RowwiseParallel(output_layouts=Partial()) if mistake else RowwiseParallel()
    model = parallelize_module(
        net(), init_device_mesh("cpu", (dist.get_world_size(),)), {"0": ColwiseParallel(), "2": last}
    )
    return whole(loop(model, make(model.parameters()), steps), model)


@pytest.mark.parametrize(
    ("train", "found"),
    [
        (ddp, {"parameters", "gradients", "norm", "bytes"}),
        (fsdp2, {"parameters", "gradients", "norm"}),
        (tensor_parallel, {"first loss", "parameters", "gradients", "norm", "bytes"}),
    ],
)
def test_a_mistake_in_another_library_is_found(
    cluster_of: Clusters, train: Callable[..., Trained], found: set[str]
) -> None:
    right = partial(train, False)
    for mistake, expected in ((False, set[str]()), (True, found)):
        said = detect(partial(train, mistake), alone, right=right, detectors=CHEAP, cluster=cluster_of(2))
        assert expected <= {name for name, one in said.items() if one.sentence}, said
        assert mistake or not any(one.sentence for one in said.values()), said


def whole_batch(make: MakeOptimizer, steps: int) -> Trained:
    """Planted: every rank trains on all rows, so that each number is right and the work is done twice."""
    model = net()
    return whole(loop(DistributedDataParallel(model), make(model.parameters()), steps), model)


def test_work_done_twice_is_found_without_a_right_training(cluster_of: Clusters) -> None:
    for train in (partial(ddp, False), partial(fsdp2, False), partial(tensor_parallel, False), whole_batch):
        said = detect(train, alone, detectors=CHEAP, cluster=cluster_of(2))
        found = {name for name, one in said.items() if one.sentence}
        assert found == ({"work"} if train is whole_batch else set()), said
        assert "all ranks together do" in said["work"].sentence or train is not whole_batch


def uneven(what: str, make: MakeOptimizer, steps: int) -> Trained:
    """Planted: rank 0 calls once more what all have to call, in a group of its own; or fails, or later."""
    if dist.get_rank() == 0 and what == ("fail late" if steps > 1 and what != "fail" else "fail"):
        raise ValueError("out of luck")
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1), group=groups[0])
    dist.destroy_process_group(groups[dist.get_rank()])
    return ddp(False, make, steps)


def test_a_training_that_stops_or_calls_in_another_order(cluster_of: Clusters) -> None:
    orders = {"order": DETECTORS["order"]}
    said = detect(partial(uneven, "call"), alone, detectors=orders, cluster=cluster_of(2))["order"].sentence
    assert re.fullmatch(r"rank 1 calls \w+ where rank 0 calls allreduce_", said)
    losses = {"first loss": DETECTORS["first loss"]}
    said = detect(partial(uneven, "fail"), alone, detectors=losses, cluster=cluster_of(2))[
        "first loss"
    ].sentence
    assert said == "the training stops: rank 0 raised ValueError: out of luck"


def test_a_training_that_stops_after_its_first_step(cluster_of: Clusters) -> None:
    """Detectors that look at one step find nothing; the others say that it stops, and which training does."""
    late, right, cluster = partial(uneven, "fail late"), partial(ddp, False), cluster_of(2)
    short = set(DETECTORS) - {"gradients", "norm"}
    for train, beside, name, those in (
        (late, right, "the training", short),
        (right, late, "the right training", {"bytes", "work", "memory"}),
    ):
        detectors = {each: DETECTORS[each] for each in (DETECTORS if train is late else CHEAP)}
        said = detect(train, alone, right=beside, detectors=detectors, cluster=cluster)
        stops = f"{name} stops: rank 0 raised ValueError: out of luck"
        assert {each: one.sentence for each, one in said.items()} == {
            each: stops if each in those else "" for each in detectors
        }


@pytest.mark.parametrize(
    ("found", "right", "wrong"), [(0.0, 0.0, False), (1e-9, 0.0, True), (-1.02, -1.0, True)]
)
def test_a_loss_may_be_0_and_negative(found: float, right: float, wrong: bool) -> None:
    runs = ({"long": Run([each] * LONG, [], [], [], [])} for each in (found, right))
    assert bool(DETECTORS["loss"](Subject(*runs, None))) is wrong
