"""Local SGD: with k = 1 it is data parallelism; with more it sends less, and the ranks differ in between."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import minidist as md
from minidist import comm
from minidist.model import GPT, config, dataset
from minidist.model.sampler import Sampler
from minidist.parallel.averaging.parameter_assignment import deal_parameters
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.models import mlp, vectors
from tests.helpers.on_ranks import on_ranks
from tests.helpers.outer_steps import ADAMW, AVERAGE, inner_step, replay
from tests.helpers.refusals import refuses


def train(case: contract.Case, **options: Any) -> tuple[contract.Trained, list[bool], int]:
    model = md.LocalSGD(case.model(md.rank()), **options)
    optimizer = case.optimizer(model.parameters())
    losses, averaged = [], []
    with comm.ledger() as ledger:
        for inputs, targets in case.global_batches():
            share = slice(*(len(inputs) * (md.rank() + i) // md.size() for i in (0, 1)))
            optimizer.zero_grad()
            loss = case.loss(model(inputs[share]), targets[share])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            averaged.append(model.synchronize())
            losses.append(float(loss.detach()))
        sent = ledger.bytes_sent
    everyones = [float(comm.all_reduce(torch.tensor(loss, dtype=torch.float64), "mean")) for loss in losses]
    return contract.Trained(everyones, model.module.state_dict()), averaged, sent


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_averaging_every_step_is_data_parallelism(cluster_of: Clusters, ranks: int, momentum: float) -> None:
    case = contract.Case(
        mlp, vectors, partial(torch.optim.SGD, lr=0.1, momentum=momentum), batches=(12, 24, 12)
    )
    for trained, averaged, sent in cluster_of(ranks).run(partial(train, case, every=1)):
        contract.compare(trained, contract.train_in_one_process(case))
        assert averaged == [True] * 3
        size = sum(8 * p.numel() for p in mlp(0).parameters())
        assert sent == 3 * (2 * (ranks - 1) * size // ranks)


def test_every_third_step_and_each_of_the_first_two(cluster_of: Clusters) -> None:
    case = contract.Case(mlp, vectors, partial(torch.optim.SGD, lr=0.1), batches=(8,) * 9)
    results = cluster_of(2).run(partial(train, case, every=3, warmup=2))
    size = sum(8 * p.numel() for p in mlp(0).parameters())
    for _, averaged, sent in results:
        assert averaged == [True, True, False, False, True, False, False, True, False]
        assert sent == 4 * size
    first, second = (trained.state for trained, _, _ in results)
    assert any(not torch.equal(first[name], second[name]) for name in first), "the ranks differ in between"


@on_ranks(3)
def test_a_group_a_frozen_parameter_and_several_buckets() -> None:
    groups = [torch.distributed.new_group(members) for members in ([0, 2], [1])]
    group = groups[0] if md.rank() != 1 else groups[1]
    model = md.LocalSGD(nn.Linear(2, 1), every=1, group=group, bucket_mb=1e-6)
    model.module.bias.requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(md.rank()))
    assert model.synchronize()
    expected = [[[1, 1], [0]], [[1, 1], [1]], [[1, 1], [2]]]
    assert [parameter.flatten().tolist() for parameter in model.parameters()] == expected[md.rank()]


# DiLoCo: the average as a step of an outer optimizer, for fragments in turns, while training goes on.

EVERY, TURNS = 4, 6


def synchronized(**options: Any) -> tuple[nn.Module, list[bool], int]:
    """Train until six fragments are synchronized; the model, when its values came, and the bytes sent."""
    model = md.LocalSGD(mlp(md.rank()), EVERY, **options)
    optimizer, came = ADAMW(model.parameters()), []
    with comm.ledger() as ledger:
        while model.outer_steps < TURNS:
            inner_step(model, optimizer, model.slot, model.steps)
            came.append(model.synchronize())
    return model.module, came, ledger.bytes_sent


@pytest.mark.parametrize(
    ("ranks", "fragments", "delay", "outer"),
    [
        (3, 1, 0, AVERAGE),
        (1, 1, 0, md.nesterov),
        (2, 1, 0, md.nesterov),
        (3, 1, 4, md.nesterov),
        (2, 2, 0, md.nesterov),
        (2, 2, 1, md.nesterov),
        (3, 4, 1, md.nesterov),
    ],
)
def test_it_equals_its_replay_and_sends_what_the_formula_says(
    cluster_of: Clusters, ranks: int, fragments: int, delay: int, outer: Any
) -> None:
    options = {"fragments": fragments, "delay": delay, "outer": outer}
    log = [{rank: rank for rank in range(ranks)}] * TURNS
    _, models = replay(log, EVERY, fragments, delay, outer)
    sizes = [part.bytes for part in deal_parameters([*mlp(0).parameters()], fragments)]
    started = TURNS + (delay == EVERY // fragments)  # the last value comes as the next one starts
    for rank, (model, came, sent) in enumerate(cluster_of(ranks).run(synchronized, **options)):
        for found, expected in zip(model.parameters(), models[rank].parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        starts = [i * EVERY // fragments for i in range(1, TURNS + 1)]
        assert [step for step, now in enumerate(came, 1) if now] == [step + delay for step in starts]
        assert sent == sum(2 * (ranks - 1) * sizes[turn % fragments] // ranks for turn in range(started))


def held_out_loss(diloco: dict[str, Any] | None) -> float:
    """Train the byte GPT on 8 rows of each rank for 500 steps. DiLoCo averages in each of the first 150."""
    data, rows = dataset("bytes", length=64), 8 * md.size()
    model = GPT(config("byte-tiny"), seed=0)
    parallel: Any
    if diloco is None:
        parallel = md.DataParallel(model)
    else:
        parallel = md.LocalSGD(model, 50, warmup=150, outer=md.nesterov, **diloco)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    sampler = Sampler(len(data.train), rows, rank=md.rank(), ranks=md.size())
    for step in range(500):
        inputs, targets = data.train[sampler.share(step)]
        optimizer.zero_grad()
        md.cross_entropy(parallel(inputs), targets).backward()  # type: ignore[no-untyped-call]
        if diloco is None:
            parallel.synchronize()
        optimizer.step()
        if diloco is not None:
            parallel.synchronize()
    if diloco is not None:
        parallel.average()
    with torch.no_grad():
        inputs, targets = data.test[torch.arange(1024)]
        return float(md.cross_entropy(model(inputs), targets))


@pytest.mark.deep
def test_the_loss_at_50_steps_is_at_most_2_percent_above_data_parallelism(cluster_of: Clusters) -> None:
    """From the same start with the same rows and as many steps, with and without fragments in turns."""
    forms: list[dict[str, Any] | None] = [None, {}, {"fragments": 2, "delay": 5}]
    plain, *others = (cluster_of(2).run(held_out_loss, diloco)[0] for diloco in forms)
    print(f"data parallel {plain:.4f}, then DiLoCo: {', '.join(f'{loss:.4f}' for loss in others)}")
    assert max(others) <= 1.02 * plain


@on_ranks(2)
def test_training_goes_on_while_the_average_is_under_way() -> None:
    """Rank 1 begins to average when rank 0 has made two more steps. Without a delay rank 0 would wait."""
    model, token, came = md.LocalSGD(mlp(0), 3, delay=2, outer=md.nesterov), torch.zeros(1), []
    for step in range(1, 6):
        if md.rank() == 1 and step == 3:
            comm.recv(token, 0)
        if md.rank() == 0 and step == 5:
            comm.send(token, 1)
        came.append(model.synchronize())
    assert came == [False] * 4 + [True]


@on_ranks(2)
def test_the_end_of_training_averages_what_is_under_way() -> None:
    model = md.LocalSGD(nn.Linear(1, 1, bias=False), 2, delay=1, outer=AVERAGE)
    with torch.no_grad():
        model.module.weight.fill_(md.rank())
    assert not model.synchronize()
    assert not model.synchronize()
    model.average()
    anchors = [anchor.item() for anchor in model._exchange.anchors.values()]
    model.module.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="other parameters get gradients than when LocalSGD was made"):
        model.average()
    assert [model.module.weight.item(), *anchors] == [0.5, 0.5]


test_wrong_arguments = refuses(
    lambda **given: md.LocalSGD(nn.Linear(1, 1), **given),
    ({"every": 0}, "every is 0; give at least 1, the steps between two averagings"),
    ({"every": 1.5}, TypeError, r"every is 1.5 \(float\); give an integer, the steps"),
    ({"warmup": -1}, "warmup is -1; give at least 0, the steps at the start"),
    ({"outer": "nesterov"}, TypeError, "outer is a str; give a function from parameters to an optimizer"),
    ({"every": 4, "fragments": 5}, "every is 4, fragments 5 and delay 0: a fragment starts"),
    ({"every": 4, "fragments": 2, "delay": 3}, "every 2 steps; .* and no longer delay than that"),
)
