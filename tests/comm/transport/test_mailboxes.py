"""Messages through mailboxes: in any order, of any size, without room or access, and from a dead sender."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import minidist as md
from minidist import comm
from minidist.comm import messages
from minidist.comm.transport import mailbox
from minidist.comm.transport.ipc import HOST_VARIABLE, this_process
from tests.conftest import Clusters
from tests.helpers.clocks import HANG
from tests.helpers.on_ranks import on_ranks

SIZES = [0, 1, 7, 1000, 2**18 + 1, 2**20, 2**20 + 1]


@on_ranks(2, dtype=(torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64))
def test_every_size_arrives(dtype: torch.dtype) -> None:
    other = 1 - md.rank()
    for size in SIZES:
        x = (torch.arange(size) % 251 + md.rank()).to(dtype)
        with comm.ledger() as ledger:
            work = comm.send(x, other, async_op=True)
            received = comm.recv(torch.empty(size, dtype=dtype), other)
            work.wait()
        assert torch.equal(received, (torch.arange(size) % 251 + other).to(dtype))
        assert ledger.bytes_sent == x.numel() * x.element_size()
        over_gloo = x.nbytes > 2**22
        assert ledger.calls[0].algorithm == ("torch" if over_gloo else "shared_memory")
        assert ledger.bytes_on_wire == x.nbytes * over_gloo


@on_ranks(2)
def test_tags_and_groups_are_apart_and_each_is_in_order() -> None:
    group, other = dist.new_group([0, 1]), 1 - md.rank()
    lanes: list[tuple[int, Any]] = [(0, None), (1, None), (0, group), (1, group)]
    for i in range(3):
        for k, (tag, lane) in enumerate(lanes):
            comm.send(torch.tensor([100.0 * md.rank() + 10 * k + i]), other, tag, lane)
    ahead = [  # asked for before and after they arrive, and waited for in another order
        [comm.recv(torch.empty(1), other, tag, lane, async_op=True) for _ in range(3)]
        for tag, lane in reversed(lanes)
    ]
    for k, works in zip((3, 2, 1, 0), ahead, strict=True):
        for i in (2, 0, 1):
            assert works[i].wait().item() == 100 * other + 10 * k + i


@on_ranks(2)
def test_what_finds_no_room_goes_over_gloo_in_order() -> None:
    other, count, size = 1 - md.rank(), 24, 2**18  # 24 MiB, where 16 fit
    with comm.ledger() as ledger:
        works = [comm.send(torch.full((size,), float(i)), other, async_op=True) for i in range(count)]
        large = comm.send(torch.full((2**21,), -1.0), other, async_op=True)  # by gloo, with the same tag
    comm.barrier()
    coming = comm.recv(torch.empty(2**21), other, async_op=True)
    for i in range(count):
        assert torch.equal(comm.recv(torch.empty(size), other), torch.full((size,), float(i)))
    assert coming.wait()[0] == -1
    for work in (*works, large):
        work.wait()
    x = comm.send(torch.ones(1), other, async_op=True)
    assert comm.recv(torch.empty(1), other).item() == 1  # there is room again
    x.wait()
    assert (ledger.bytes_sent, ledger.bytes_on_wire) == (24 * 2**20 + 2**23, 8 * 2**20 + 2**23)


@on_ranks(2)
def test_the_ring_of_bytes_goes_round() -> None:
    other = 1 - md.rank()
    with comm.ledger() as ledger:
        comm.send(torch.zeros(1), other)  # one message always stays, so the ring never begins anew
        for i in range(60):
            size = 2**18 + 17 * i
            comm.send(torch.arange(size) + i, other, 1)
            assert torch.equal(comm.recv(torch.empty(size).long(), other, 1), torch.arange(size) + i)
            comm.send(torch.zeros(1), other)
            comm.recv(torch.empty(1), other)
        comm.recv(torch.empty(1), other)
    assert ledger.bytes_on_wire == 0


@on_ranks(2)
def test_another_size_than_expected_is_named() -> None:
    other = 1 - md.rank()
    comm.send(torch.ones(3), other)
    with pytest.raises(md.CollectiveError) as error:
        comm.recv(torch.empty(4), other)
    comm.send(torch.ones(3), other)  # later messages still arrive
    assert comm.recv(torch.empty(3), other).tolist() == [1, 1, 1]
    assert "12 bytes, and 16 were expected" in str(error.value)
    assert "recv of float32[4]" in str(error.value)


@contextmanager
def mailboxes_anew(turn: int) -> Iterator[None]:
    """Replace the mailboxes of the rank's world, so that every rank opens those of the others again."""
    store = dist.distributed_c10d._get_default_store()
    kept = [*mailbox.joined]
    apart = dist.PrefixStore(f"again/{turn}", store)  # type: ignore[attr-defined]
    made = mailbox.Mailboxes(apart, md.rank(), md.size())
    mailbox.joined[:] = [made]
    comm.barrier()
    try:
        yield
        comm.barrier()
    finally:
        made.close()
        mailbox.joined[:] = kept


def exchanged() -> tuple[int, list[float]]:
    """Send three messages each way. Returns the bytes over sockets, and what arrived."""
    other = 1 - md.rank()
    with comm.ledger() as ledger:
        works = [comm.send(torch.full((3,), float(i)), other, async_op=True) for i in range(3)]
        received = [comm.recv(torch.empty(3), other)[0].item() for _ in range(3)]
        for work in works:
            work.wait()
    return ledger.bytes_on_wire, received


def no_access(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 cannot open the other's file."""
    opened = os.open

    def refuse(path: Any, *rest: Any) -> int:
        if md.rank() == 0 and str(path).startswith("/proc/") and "/fd/" in str(path):
            raise PermissionError(path)
        return opened(path, *rest)

    patch.setattr(os, "open", refuse)


def no_memory(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 cannot make its file."""
    if md.rank() == 1:
        patch.setattr(os, "posix_fallocate", Mock(side_effect=OSError("no memory")))


def other_hosts(patch: pytest.MonkeyPatch) -> None:
    patch.setenv(HOST_VARIABLE, str(md.rank()))


@pytest.mark.parametrize(("hinder", "of_rank_1"), [(no_access, 0), (no_memory, 36), (other_hosts, 36)])
def test_what_cannot_use_a_mailbox_goes_over_gloo(
    cluster_of: Clusters, hinder: Callable[[pytest.MonkeyPatch], None], of_rank_1: int
) -> None:
    """The bytes over sockets: all of rank 0's, and those of rank 1 unless rank 0 alone is hindered."""

    def exchange() -> tuple[int, list[float]]:
        with pytest.MonkeyPatch.context() as patch:
            hinder(patch)
            with mailboxes_anew(turn):
                return exchanged()

    turn = time.monotonic_ns()
    assert cluster_of(2).run(exchange) == [(36, [0, 1, 2]), (of_rank_1, [0, 1, 2])]


@on_ranks(2)
def test_threads_may_receive_at_once() -> None:
    other = 1 - md.rank()

    def receive(tag: int) -> float:
        return sum(comm.recv(torch.empty(1), other, tag).item() for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        received = pool.map(receive, range(4))
        for i in range(20):
            for tag in range(4):
                comm.send(torch.tensor([float(tag * i)]), other, tag)
    assert [*received] == [0.0, 190.0, 380.0, 570.0]


def test_a_receiver_learns_that_its_sender_has_ended() -> None:
    def exchange() -> None:
        if md.rank() == 1:
            comm.send(torch.ones(1), 0)
            os.kill(os.getpid(), signal.SIGKILL)
        assert comm.recv(torch.empty(1), 1).item() == 1  # it sent this before it died
        comm.recv(torch.empty(1), 1)

    started = time.monotonic()
    with pytest.raises(md.RankError) as error:
        md.launch(exchange, 2, timeout=HANG)
    assert time.monotonic() - started < HANG / 2
    assert "SIGKILL" in str(error.value)


def test_too_many_messages_that_nobody_takes_are_refused() -> None:
    descriptor = os.memfd_create("a mailbox")
    os.ftruncate(descriptor, mailbox.PITCH)
    memory = memoryview(mmap.mmap(descriptor, mailbox.PITCH))
    mailbox.prepare(memory)
    sender = mailbox.Outgoing(f"/proc/self/fd/{descriptor}", 0)
    receiver = mailbox.Incoming(memory, 0, this_process(), patient=True, refused=lambda: False)

    def expect(tag: int, x: torch.Tensor) -> mailbox.Arrival:
        return receiver.expect((0, tag), x, lambda: 0.1, lambda: None)

    for i in range(mailbox.RECORDS):
        assert sender.put((0, 0), torch.tensor([i]), lambda: 0.1)
    with pytest.raises(RuntimeError, match="timed out with 1024 messages that the receiver has not taken"):
        sender.put((0, 0), torch.tensor([0]), lambda: 0.1)
    receiver.look()
    for i in range(mailbox.RECORDS):
        x = torch.tensor([-1])
        assert expect(0, x).came == 8
        assert x.item() == i
    assert sender.put((0, 0), torch.tensor([7]), lambda: 0.1)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.1 s waiting for a message"):
        expect(1, torch.tensor([0])).wait()
    sender.close()


@on_ranks(2)
def test_a_failure_comes_after_what_was_sent_and_only_to_its_key() -> None:
    other = 1 - md.rank()
    says = (
        rf"^recv of float32\[.*rank {other} failed, and this belongs to what it did; its own error says why"
    )
    ahead = [comm.recv(torch.empty(1), other, 5, async_op=True) for _ in range(2)]
    comm.send(torch.ones(1), other, 5)
    for tag in (5, 6):
        messages.tell_failure(other, tag)
    comm.send(torch.full((1,), 7.0), other, 7)
    assert ahead[0].wait().item() == 1
    for wait in (ahead[1].wait, lambda: comm.recv(torch.empty(3, 2), other, 6)):
        with pytest.raises(md.CollectiveError, match=says):
            wait()
    assert comm.recv(torch.empty(1), other, 7).item() == 7
    comm.send(torch.full((1,), 8.0), other, 5)  # a failure ends one receive
    assert comm.recv(torch.empty(1), other, 5).item() == 8


@on_ranks(2)
def test_a_receive_that_is_given_up_takes_nothing() -> None:
    other = 1 - md.rank()
    comm.recv(torch.empty(1), other, async_op=True).forget()
    comm.send(torch.full((1,), 3.0), other)
    assert comm.recv(torch.empty(1), other) == 3
