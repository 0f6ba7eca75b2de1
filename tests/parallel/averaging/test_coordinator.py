"""Workers that come and go: whatever is killed when, the weights are those of a replay of who took part."""

from __future__ import annotations

import copy
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

import minidist as md
from minidist import comm
from minidist.comm.launching.channel import Connection
from minidist.comm.membership import Membership
from minidist.parallel.averaging.exchanges import CoordinatorExchange, hello
from tests.helpers.clocks import HANG, until
from tests.helpers.models import mlp
from tests.helpers.outer_steps import ADAMW, AVERAGE, inner_step, replay
from tests.helpers.refusals import refuses

EVERY = 4


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    for (name, value), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            value, other, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_replayed(
    coordinator: md.Coordinator, workers: Sequence[tuple[int, nn.Module]], **options: Any
) -> None:
    """The coordinator's model, and those of the workers that took part to the end, are the replay's."""
    expected, models = replay(coordinator.log, EVERY, **options)
    assert_same(coordinator.model, expected)
    last = {slot: models[number] for number, slot in coordinator.log[-1].items()}
    assert len(workers) == len(last)
    for slot, model in workers:
        assert_same(model, last[slot])


def work(
    address: str,
    outer_steps: int,
    before_step: Callable[[md.LocalSGD], object] = lambda model: None,
    **options: Any,
) -> tuple[int, nn.Module]:
    """Train, at most until the coordinator ends; return the slot, and the model after the last exchange."""
    model = md.LocalSGD(mlp(99), EVERY, coordinator=address, timeout=HANG, **options)
    optimizer = ADAMW(model.parameters())
    try:
        while model.outer_steps < outer_steps:
            before_step(model)
            inner_step(model, optimizer, model.slot, model.steps)
            if model.synchronize():
                met = copy.deepcopy(model.module)
    except comm.CollectiveError as error:
        assert "has ended, or has left this process out" in str(error)  # noqa: PT017
    model.leave()
    return model.slot, met


def serve(
    coordinator: md.Coordinator,
    outer_steps: int,
    *workers: Callable[[], Any],
    after_step: Callable[[int], object] | None = None,
) -> list[Any]:
    """Serve workers that run in threads, and return what they returned."""
    with ThreadPoolExecutor(len(workers)) as pool:
        running = [pool.submit(worker) for worker in workers]
        coordinator.serve(outer_steps, after_step)
        return [each.result(HANG) for each in running]


# Workers as processes, which are killed.


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_first_step(model: md.LocalSGD) -> None:
    if model.steps % EVERY == 1:
        die()


def die_while_sending(model: md.LocalSGD) -> None:
    """Half of the second message arrives."""
    if model.outer_steps == 1:

        def send(self: Connection, message: memoryview) -> None:
            self.socket.sendall(len(message).to_bytes(8, "big") + bytes(message[: len(message) // 2]))
            die()

        Connection.send = send  # type: ignore[method-assign, assignment]


def test_killed_workers_are_left_out_and_a_new_one_joins(tmp_path: Path) -> None:
    may_come, came, coordinator = tmp_path / "1", tmp_path / "2", md.Coordinator(mlp(0), workers=3)
    address = coordinator.address

    def come_late(send: Any = Connection.send) -> None:
        def send_and_tell(self: Connection, message: memoryview) -> None:
            send(self, message)
            came.touch()

        assert until(may_come.exists)
        Connection.send = send_and_tell  # type: ignore[method-assign, assignment]

    def one_of_four() -> tuple[int, nn.Module]:
        def survive(model: md.LocalSGD) -> None:
            assert model.outer_steps < 5 or until(came.exists)

        if md.rank() == 3:
            come_late()
        return work(address, 8, (die_in_the_first_step, die_while_sending, survive, survive)[md.rank()])

    with md.Cluster(4, timeout=HANG, threads=1, may_fail=range(4)) as cluster:
        [results] = serve(
            coordinator,
            8,
            lambda: cluster.run(one_of_four),
            after_step=lambda number: may_come.touch() if number == 4 else None,
        )
    log, (first, second, *living) = coordinator.log, results
    assert isinstance(first, md.RankDied)
    assert isinstance(second, md.RankDied)
    assert [len(took_part) for took_part in (*log[:4], log[-1])] == [2, 1, 1, 1, 2]
    assert log[-1].keys() > log[0].keys() & log[1].keys(), "the same worker from the first to the last"
    assert_replayed(coordinator, living)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_same(coordinator.model, replay([*log[:2], log[0], *log[3:]], EVERY)[0])


class Over(Exception): ...


@pytest.mark.deep
def test_twenty_kills_at_random_moments() -> None:
    """Nobody is restarted, nobody waits for the dead, and the weights are those of the same membership."""
    draw, times, killed, over = random.Random(0), [], [], threading.Event()
    coordinator = md.Coordinator(mlp(0), workers=3)
    clusters: list[md.Cluster] = []
    running: list[Future[Any]] = []

    def after_step(number: int) -> None:
        times.append(time.monotonic())
        if over.is_set():
            raise Over

    def start() -> None:
        clusters.append(cluster := md.Cluster(1, timeout=None, threads=1))
        running.append(pool.submit(cluster.run, work, coordinator.address, 10**6))

    with ThreadPoolExecutor(24) as pool:
        served = pool.submit(coordinator.serve, 10**6, after_step)
        for _ in range(3):
            start()
        alive = [0, 1, 2]
        for _ in range(20):
            assert until(lambda: len(coordinator._slots) == 3)
            time.sleep(draw.uniform(0, 0.05))
            victim = alive.pop(draw.randrange(3))
            killed.append(time.monotonic())
            clusters[victim].signal(signal.SIGKILL)
            alive.append(len(clusters))
            start()
        assert until(lambda: len(coordinator._slots) == 3)
        over.set()
    assert isinstance(served.exception(), Over)
    died = [number for number, each in enumerate(running) if isinstance(each.exception(), md.RankDied)]
    assert len(died) == 20
    assert_replayed(coordinator, [running[number].result()[0] for number in alive])
    for cluster in clusters:
        cluster.close()
    waits = [min(time for time in times if time > when) - when for when in killed]
    print(f"{len(times)} outer steps; the next one after a kill came within {max(waits):.2f} s")
    assert max(waits) < 2


# Workers as threads of this process.


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (1, 4), (2, 0), (2, 1), (4, 1)])
def test_fragments_in_turns_with_a_coordinator(fragments: int, delay: int) -> None:
    coordinator = md.Coordinator(mlp(0), workers=2, fragments=fragments)
    arguments: dict[str, int] = {"fragments": fragments, "delay": delay}
    workers = serve(coordinator, 6, *[lambda: work(coordinator.address, 6, **arguments)] * 2)
    assert_replayed(coordinator, workers, **arguments)


def test_an_outer_step_of_rate_1_is_the_average_and_bytes_are_those_of_the_formula() -> None:
    coordinator = md.Coordinator(mlp(0), AVERAGE, workers=2)
    with comm.ledger() as ledger:
        workers = serve(coordinator, 3, *[lambda: work(coordinator.address, 3)] * 2)
    assert_replayed(coordinator, workers, outer=AVERAGE)
    size = sum(8 * p.numel() for p in mlp(0).parameters())
    sent = {name: sum(c.bytes_sent for c in ledger.calls if c.name == name) for name in ("exchange", "send")}
    assert sent == {"exchange": 2 * (16 + 3 * (size + 16)), "send": 2 * (8 + size + 16) + 2 * 3 * (size + 16)}


def test_what_is_no_worker_of_this_model_is_refused_and_hurts_nobody() -> None:
    coordinator = md.Coordinator(mlp(0), workers=2)

    def strangers() -> None:
        host, port = coordinator.address.split(":")
        for text in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(8), (16).to_bytes(8, "big") + b"x" * 16):
            with socket.create_connection((host, int(port)), HANG) as end:
                end.sendall(text)
        for model, options in ((mlp(0, (6, 5, 4)), {}), (mlp(0), {"fragments": 2})):
            with pytest.raises(
                ValueError, match=r"fragments \([12]\), or the model in .* is not as on the coord"
            ):
                md.LocalSGD(model, EVERY, coordinator=coordinator.address, **options)

    def wrong_message() -> None:
        strangers()
        member = Membership(coordinator.address, HANG)
        member.exchange(hello(mlp(0), 1))
        member.receive()
        with pytest.raises(comm.CollectiveError, match="has ended, or has left this process out"):
            member.exchange(torch.zeros(24, dtype=torch.uint8))

    _, *others = serve(coordinator, 3, wrong_message, lambda: work(coordinator.address, 3))
    assert [len(took_part) for took_part in coordinator.log] == [1, 1, 1]
    assert_replayed(coordinator, others)


def test_a_worker_that_takes_too_long_is_left_out() -> None:
    """Also the last one: then the coordinator ends. The limit is over as soon as one of two has sent."""
    coordinator = md.Coordinator(mlp(0), workers=2, timeout=HANG)

    def send_nothing() -> None:
        silent = Membership(coordinator.address, HANG)
        silent.exchange(hello(mlp(0), 1))
        silent.receive()
        assert until(lambda: coordinator._sent)
        coordinator.timeout = 0.0
        coordinator._wait_again()
        Membership(coordinator.address, HANG).close()  # wakes it
        assert until(lambda: coordinator.log)
        with pytest.raises(comm.CollectiveError, match="has ended, or has left this process out"):
            silent.exchange(hello(mlp(0), 1))

    def send_once() -> None:
        exchange = CoordinatorExchange(mlp(0), coordinator.address, 1, HANG)
        exchange.start(0)
        exchange.finish()
        exchange.close()

    with pytest.raises(TimeoutError, match=r"0 workers have come to .* within 0 s, and 1 are needed"):
        serve(coordinator, 2, send_nothing, send_once)
    assert [len(took_part) for took_part in coordinator.log] == [1]


def test_a_worker_that_hangs_does_not_end_the_others() -> None:
    """Though their own timeout is shorter than the coordinator's."""
    coordinator = md.Coordinator(mlp(0), workers=2, timeout=0.5)

    def hang() -> None:
        exchange = CoordinatorExchange(mlp(0), coordinator.address, 1, 0.3)
        with pytest.raises(comm.CollectiveError, match="has left this process out"):
            exchange._membership.receive()

    def send_twice() -> None:
        exchange = CoordinatorExchange(mlp(0), coordinator.address, 1, 0.3)
        for turn in range(2):
            exchange.start(turn)
            exchange.finish()
        exchange.close()

    serve(coordinator, 2, hang, send_twice)
    assert [len(took_part) for took_part in coordinator.log] == [1, 1]


def test_the_time_limit_begins_with_serve_which_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as long_ago:
        long_ago.setattr(time, "monotonic", lambda: -1e7)
        coordinator = md.Coordinator(mlp(0))

    def leave() -> None:
        model = md.LocalSGD(mlp(0), 1, coordinator=coordinator.address)
        model.synchronize()
        model.leave()
        with pytest.raises(RuntimeError, match=r"synchronize was called after leave\(\)"):
            model.synchronize()

    serve(coordinator, 1, leave)
    with pytest.raises(RuntimeError, match="serve has ended, and its connections too"):
        coordinator.serve(2)


def test_only_a_coordinator_that_has_ended_well_waits_until_its_last_answers_are_sent() -> None:
    """One that was interrupted does not wait long for a worker that does not read."""
    for interrupt, limit in ((None, HANG), (KeyboardInterrupt, 1.0)):
        coordinator = md.Coordinator(mlp(0), timeout=HANG)
        worker, after_step = partial(work, coordinator.address, 1), Mock(side_effect=interrupt)
        with (
            patch.object(coordinator._members, "close", wraps=coordinator._members.close) as close,
            suppress(KeyboardInterrupt),
        ):
            serve(coordinator, 1, worker, after_step=after_step)
        close.assert_called_once_with(limit)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_worker_leaves_at_once_while_an_exchange_is_under_way(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By leave(), or by an interrupt where it waits. The coordinator's other worker never sends."""
    coordinator = md.Coordinator(mlp(0), workers=2, timeout=HANG)
    left = threading.Event()

    def leave() -> None:
        model = md.LocalSGD(mlp(0), 1, coordinator=coordinator.address, delay=1)
        assert not model.synchronize()
        [thread] = [each for each in threading.enumerate() if each.name == "coordinator"]
        assert thread.daemon, "the process would wait for it at its end"
        assert until(lambda: coordinator._sent, HANG / 2)
        assert thread.is_alive()
        if interrupted:
            monkeypatch.setattr(Future, "result", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                model.synchronize()
            monkeypatch.undo()
        else:
            model.leave()
        thread.join(HANG / 2)
        assert not thread.is_alive()
        assert until(lambda: len(coordinator._slots) == 1, HANG / 2)
        left.set()

    def send_nothing() -> None:
        exchange = CoordinatorExchange(mlp(0), coordinator.address, 1, HANG)
        assert left.wait(HANG)
        exchange.close()

    with pytest.raises(Over):
        serve(coordinator, 2, leave, send_nothing, after_step=Mock(side_effect=Over))


def test_a_worker_notices_that_the_coordinator_ends_or_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(
            comm.CollectiveError, match=f"coordinator at {address} did not answer within 0.01 s"
        ):
            md.LocalSGD(mlp(0), EVERY, coordinator=address, timeout=0.01)

        listener.accept()[0].close()
        with ThreadPoolExecutor() as pool:
            pool.submit(lambda: listener.accept()[0].close())
            with pytest.raises(comm.CollectiveError, match="has ended") as caught:
                md.LocalSGD(mlp(0), EVERY, coordinator=address, timeout=HANG)
        assert caught.value.peer_ended
    with pytest.raises(ConnectionRefusedError, match=f"no coordinator listens at {address}"):
        md.LocalSGD(mlp(0), EVERY, coordinator=address)


PORT_80 = "127.0.0.1:80"
test_wrong_arguments = refuses(
    lambda call: call(),
    (lambda: md.Coordinator(mlp(0), workers=0), "workers is 0; give at least 1"),
    (lambda: md.Coordinator(mlp(0), fragments=5), "fragments is 5, but the model has 4 trainable"),
    (lambda: md.Coordinator(mlp(0), port=65536), "port is 65536; give at most 65535"),
    (lambda: md.Coordinator(mlp(0), timeout=-1), "timeout is -1; give seconds above 0"),
    (lambda: md.Coordinator(mlp(0), timeout=float("nan")), "timeout is nan; give seconds above 0"),
    (lambda: md.LocalSGD(mlp(0), coordinator=PORT_80, timeout=0), "timeout is 0; give seconds"),
    (lambda: md.LocalSGD(mlp(0), coordinator="127.0.0.1:99999"), "coordinator is '127.0.0.1:99999'"),
    (lambda: md.LocalSGD(mlp(0), coordinator="example.org:80"), "coordinator is 'example.org:80'; give its"),
    (lambda: md.LocalSGD(mlp(0), coordinator=PORT_80, warmup=1), "group, outer and warmup go without"),
)
