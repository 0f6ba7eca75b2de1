"""The parameter server: one process's weights where it is synchronous, staleness, bytes, and deaths."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import minidist as md
from minidist import comm
from minidist.parallel.averaging.parameter_assignment import deal_parameters
from minidist.parallel.averaging.serving import ServerReport
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.clocks import HANG
from tests.helpers.models import mlp, vectors
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import refuses
from tests.parallel.sharding.cases import CASES

SGD = partial(torch.optim.SGD, lr=0.1)


def frozen(seed: int) -> nn.Module:
    model = mlp(seed)
    next(model.parameters()).requires_grad_(False)
    return model


NAMES = "mlp", "gpt", "sgd", "frozen", "tied", "unused", "buffers"


def train_on_this_rank(case: contract.Case, servers: int, bound: int | None = 0) -> contract.Trained:
    """The contract's training in a loop of one's own; a loss is this rank's part of the global mean."""
    model = case.model(md.rank())
    server = md.ParameterServer(model, case.optimizer, servers, bound)
    losses = []
    if server.is_server:
        server.serve()
        losses = [0.0 for _ in case.batches]
    else:
        for inputs, targets in case.global_batches():
            share = slice(*(len(inputs) * (server.worker + i) // server.workers for i in (0, 1)))
            server.pull()
            loss = case.loss(model(inputs[share]), targets[share])
            loss.backward()  # type: ignore[no-untyped-call]
            server.push(rows=len(inputs[share]))
            losses.append(float(loss.detach()) * len(inputs[share]) / len(inputs))
        server.done()
    return contract.Trained(losses, {name: value.clone() for name, value in model.state_dict().items()})


def check(cluster: md.Cluster, case: contract.Case, servers: int, bound: int | None = 0) -> None:
    """Fail where a rank's weights, or the losses over all workers, are not one process's."""
    expected = contract.train_in_one_process(case)
    trained = cluster.run(train_on_this_rank, case, servers, bound)
    losses = [sum(parts) for parts in zip(*(rank.losses for rank in trained), strict=True)]
    for rank in trained:
        contract.compare(contract.Trained(losses, rank.state), expected)


@pytest.mark.parametrize(
    ("name", "servers", "workers"),
    [*((name, 1, 3) for name in NAMES), *((name, 2, 2) for name in NAMES), ("mlp", 1, 1), ("unused", 2, 3)],
)
def test_bound_0_equals_one_process(cluster_of: Clusters, name: str, servers: int, workers: int) -> None:
    check(cluster_of(servers + workers), CASES[name], servers)


def step(server: md.ParameterServer, rows: int = 4) -> None:
    """A worker's computation and push; it has pulled."""
    inputs, targets = vectors(torch.Generator().manual_seed(server.worker), rows)
    md.cross_entropy(server.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    server.push(rows)


def slow_and_fast(bound: int | None, released: int) -> ServerReport | None:
    """The slow worker pulls at once and pushes when the fast one has pulled `released` updates; 6 pushes."""
    server = md.ParameterServer(mlp(0), SGD, max_staleness=bound)
    token = torch.zeros(1)
    if server.is_server:
        return server.serve()
    if server.worker == 0:
        server.pull()
        comm.send(token, 2)
        comm.recv(token, 2)
        step(server)
    else:
        comm.recv(token, 1)
        for taken in range(5):
            server.pull()
            if taken == released:
                comm.send(token, 1)
            step(server)
        if server.pull() and released == 5:
            comm.send(token, 1)
    server.done()
    return None


@pytest.mark.parametrize(
    ("bound", "released", "staleness"),
    [
        (None, 5, {0: 5, 5: 1}),
        (None, 3, None),
        (5, 5, {0: 5, 5: 1}),
        (2, 2, {0: 4, 1: 1, 2: 1}),
        (1, 1, {0: 4, 1: 2}),
        (0, 0, {0: 6}),
    ],
)
def test_staleness_is_measured_and_bounded(
    cluster_of: Clusters, bound: int | None, released: int, staleness: dict[int, int] | None
) -> None:
    report, *_ = cluster_of(3).run(slow_and_fast, bound, released)
    assert report.pushes == {1: 1, 2: 5}
    assert report.updates == (5 if bound == 0 else 6), (
        "at bound 0 the slow worker's one push shares an update"
    )
    if staleness is not None:
        assert report.staleness == staleness
    else:
        assert 3 <= max(report.staleness) <= 5
        assert sum(report.staleness.values()) == 6


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_step_sends_what_the_formula_says(cluster_of: Clusters, servers: int, workers: int) -> None:
    steps = 3

    def count() -> tuple[list[int], int]:
        model = frozen(0)
        server = md.ParameterServer(model, SGD, servers)
        if server.is_server:
            with comm.ledger() as ledger:
                server.serve()
            return [], ledger.bytes_sent
        sent = []
        for _ in range(steps):
            with comm.ledger() as ledger:
                server.pull()
                step(server)
            sent.append(ledger.bytes_sent)
        with comm.ledger() as ledger:
            server.done()
        return sent, ledger.bytes_sent

    sizes = [8 * 5, 8 * 5 * 3, 8 * 3]  # the first layer's weight is frozen
    by_worker, by_servers = 32 * servers + 3 + sum(sizes), 16 * servers + sum(sizes)
    results = cluster_of(servers + workers).run(count)
    for sent, at_the_end in results[servers:]:
        assert sent == [by_worker] * steps
        assert at_the_end == 32 * servers
    # One pull more for each worker, and each server's part to the other.
    final = (servers - 1) * by_servers
    assert sum(sent for _, sent in results[:servers]) == workers * (steps + 1) * by_servers + final
    # Each server by its own part: the largest parameter alone, the two others together.
    held = [sum(sizes)] if servers == 1 else [8 * 5 * 3, 8 * 5 + 8 * 3]
    for (_, sent), part in zip(results, held, strict=False):
        assert sent == (workers * (steps + 1) + servers - 1) * (16 + part)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 12))
def test_parts_hold_every_parameter_once_and_are_balanced(lengths: list[int], servers: int) -> None:
    dtypes = (torch.float64, torch.float16, torch.float32, torch.complex128)
    parameters = [nn.Parameter(torch.randn(n, dtype=dtypes[i % 4])) for i, n in enumerate(lengths)]
    if servers > len(parameters):
        with pytest.raises(
            ValueError, match=f"servers is {servers}, but the model has {len(parameters)} train"
        ):
            deal_parameters(parameters, servers)
        return
    parts = deal_parameters(parameters, servers)
    assert sorted(id(p) for part in parts for p in part.parameters) == sorted(map(id, parameters))
    assert all(part.parameters for part in parts)
    sizes = [p.numel() * p.element_size() for p in parameters]
    assert max(part.bytes for part in parts) - min(part.bytes for part in parts) <= max(sizes)
    for part in parts:  # what is packed is what comes out, whatever the dtypes
        before = [p.detach().clone() for p in part.parameters]
        message = part.pack_values(updates=2**40)
        with torch.no_grad():
            for p in part.parameters:
                p.zero_()
        assert part.load_values(message) == 2**40
        for p, value in zip(part.parameters, before, strict=True):
            torch.testing.assert_close(p.detach(), value, rtol=0, atol=0)


def test_gradients_travel_sparse_ones_and_missing_ones_too() -> None:
    embedding, linear, unused = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1, bias=False), nn.Linear(3, 1)
    linear(embedding(torch.tensor([1, 1, 3]))).sum().backward()
    (part,) = deal_parameters([*embedding.parameters(), *linear.parameters(), *unused.parameters()], 1)
    first, second, *none = part.unpack_gradients(part.pack_gradients())
    assert none == [None, None]
    assert embedding.weight.grad is not None
    torch.testing.assert_close(first, embedding.weight.grad.to_dense(), rtol=0, atol=0)
    torch.testing.assert_close(second, linear.weight.grad, rtol=0, atol=0)


# Deaths. Ranks 0 and 1 may serve, 2 to 4 work; after each the next test starts fresh ranks.


@pytest.fixture(scope="module")
def mortal() -> Iterator[md.Cluster]:
    with md.Cluster(5, timeout=HANG, may_fail=(2, 3, 4)) as cluster:
        yield cluster


STEPS = 5
BATCH = 15


class PlainSGD:
    """SGD at 0.1. The first optimizer of torch's own imports for most of a second in every fresh rank."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


def die_in_the_middle(servers: int, bound: int | None, raising: bool, victims: tuple[int, ...]) -> Any:
    """Train; the victims die in their third step. On servers the report, and the model everywhere."""
    torch.manual_seed(md.rank())
    model = mlp(md.rank())
    server = md.ParameterServer(model, PlainSGD, servers, bound)
    report = None
    if server.is_server:
        report = server.serve()
    else:
        generator = torch.Generator().manual_seed(3)
        for number in range(STEPS):
            inputs, targets = vectors(generator, BATCH)
            server.pull()
            if number == 2 and md.rank() in victims:
                if raising:
                    raise KeyError("lost")
                os.kill(os.getpid(), signal.SIGKILL)
            share = slice(*(BATCH * (server.worker + i) // server.workers for i in (0, 1)))
            md.cross_entropy(model(inputs[share]), targets[share]).backward()  # type: ignore[no-untyped-call]
            server.push(len(inputs[share]))
        server.done()
    return report, model.state_dict()


@pytest.mark.parametrize(
    ("servers", "bound", "raising"),
    [(1, None, False), (1, 0, True), (2, 1, False)],
)
def test_a_worker_that_dies_does_not_stop_the_others(
    mortal: md.Cluster, servers: int, bound: int | None, raising: bool
) -> None:
    results = mortal.run(die_in_the_middle, servers, bound, raising, (3,))
    error = results.pop(3)
    assert isinstance(error, md.RankError)
    assert isinstance(error, md.RankDied) is not raising
    assert error.rank == 3
    for report, _ in results[:servers]:
        assert report.died == (3,)
        assert report.pushes == {rank: 2 if rank == 3 else STEPS for rank in range(servers, 5)}
        assert max(report.staleness) <= (100 if bound is None else bound)
    for _, state in results:
        torch.testing.assert_close(state, results[0][1], rtol=0, atol=0)


def test_bound_0_goes_on_with_the_rows_that_are_left(mortal: md.Cluster) -> None:
    results = mortal.run(die_in_the_middle, 2, 0, False, (4,))
    model, generator = mlp(0), torch.Generator().manual_seed(3)
    drawn = [vectors(generator, BATCH) for _ in range(STEPS)]
    left = [BATCH] * 2 + [10] * (STEPS - 2)  # the last of three workers has rows 10 to 14
    batches = [(x[:rows], y[:rows]) for (x, y), rows in zip(drawn, left, strict=True)]
    contract.plain_steps(model, SGD(model.parameters()), batches, contract.of_outputs(md.cross_entropy))
    for result in results[:4]:
        torch.testing.assert_close(result[1], model.state_dict(), rtol=1e-10, atol=1e-10)


def test_a_server_outlives_all_its_workers(mortal: md.Cluster) -> None:
    (report, _), (other, _), *errors = mortal.run(die_in_the_middle, 2, 0, False, (2, 3, 4))
    assert sorted(report.died) == sorted(other.died) == [2, 3, 4]
    assert all(isinstance(error, md.RankDied) for error in errors)


@pytest.mark.parametrize(("bound", "victim"), [(None, 0), (0, 1)])
def test_a_server_that_dies_stops_all(mortal: md.Cluster, bound: int | None, victim: int) -> None:
    def work() -> None:
        def die(updates: int) -> None:
            if md.rank() == victim and updates == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        server = md.ParameterServer(mlp(0), PlainSGD, 2, bound)
        if server.is_server:
            server.serve(after_update=die)
        else:
            while True:
                server.pull()
                step(server)

    with pytest.raises(md.RankDied, match=f"rank {victim} was killed by SIGKILL") as caught:
        mortal.run(work)
    assert caught.value.rank == victim


def test_workers_killed_at_random_moments(mortal: md.Cluster) -> None:
    """Whatever they were doing, in the middle of a message too: the others finish, and the report knows."""
    draw = random.Random(4)

    def work(victim: int, bound: int | None, delay: float) -> tuple[int, ...]:
        model = nn.Linear(300, 300).double()
        server = md.ParameterServer(model, PlainSGD, 2, bound)
        if server.is_server:
            return server.serve().died
        dying = md.rank() == victim
        if dying:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while server.pull() < 20 or dying:
            model(torch.ones(2, 300, dtype=torch.float64)).sum().backward()
            server.push(2)
        server.done()
        return ()

    for number in range(3):
        victim, bound = draw.choice((2, 3, 4)), (None, 0, 2)[number]
        results = mortal.run(work, victim, bound, draw.uniform(0.0, 0.05))
        assert isinstance(results[victim], md.RankDied)
        assert results[:2] == [(victim,)] * 2
        assert [result for rank, result in enumerate(results[2:], 2) if rank != victim] == [()] * 2


@on_ranks(2)
def test_calls_at_the_wrong_place_are_told() -> None:
    server = md.ParameterServer(mlp(0), SGD)
    if server.is_server:
        with pytest.raises(RuntimeError, match=r"pull was called on rank 0, which serves; call serve\(\)"):
            server.pull()
        server.serve()
        with pytest.raises(RuntimeError, match="serve was called a second time"):
            server.serve()
        return
    with pytest.raises(RuntimeError, match="serve was called on rank 1, which works"):
        server.serve()
    with pytest.raises(RuntimeError, match="push was called without a pull before it"):
        server.push(1)
    server.pull()
    for wrong, kind in ((0, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(kind, match=f"rows is {wrong}"):
            server.push(wrong)  # type: ignore[arg-type]
    step(server)
    with pytest.raises(RuntimeError, match="push was called without a pull before it"):
        server.push(1)
    server.done()
    with pytest.raises(RuntimeError, match="pull was called after done"):
        server.pull()


test_wrong_arguments = refuses(
    lambda **given: md.ParameterServer(**{"model": mlp(0), "optimizer": SGD, **given}),
    ({"model": print}, TypeError, "model is a builtin_function_or_method; give a torch.nn.Module"),
    ({"optimizer": 3}, TypeError, "optimizer is a int; give a function from parameters"),
    ({"servers": 0}, "servers is 0; give at least 1"),
    ({"servers": True}, TypeError, "servers is True \\(bool\\); give an integer"),
    ({"max_staleness": -1}, "max_staleness is -1; give at least 0, or None for no bound"),
    ({"max_staleness": 1.5}, TypeError, r"max_staleness is 1.5 \(float\); give an integer, or None for"),
    ({}, "servers is 1, but the world has 1 ranks; start at least 2"),
)
