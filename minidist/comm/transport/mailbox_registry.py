"""Decide which messages go through mailboxes (`mailbox.py`), and find the mailboxes of other ranks.

Every rank makes one unnamed file with a mailbox for each other rank, and announces it in the world's store as
it joins. A sender opens the receiver's file at its first message. If it cannot, it says so in the store,
where a receiver that waits for a first message looks. Other messages go through torch.distributed.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from minidist.comm import returned_ranks
from minidist.comm.ledgers import MessageIdentity
from minidist.comm.transport import host, mailbox
from minidist.comm.transport.algorithm_choice import preferred
from minidist.comm.transport.host import Process
from minidist.comm.work import Group, GroupTable, limit_of, process_group, ranks_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LARGEST = 2**22
"""Bytes of the largest message that goes through a mailbox. Both sides know the size, so they agree."""

joined: list[Mailboxes] = []
"""The mailboxes of the world that this process has joined, if any."""
_numbers: GroupTable[int] = GroupTable()


def start(store: Store, own: int, ranks: int) -> None:
    """Make this rank's mailboxes and announce them, before the world is complete."""
    stop()
    if ranks > 1:
        joined.append(Mailboxes(store, own, ranks))


def stop() -> None:
    """Forget the mailboxes: their world has ended."""
    while joined:
        joined.pop().close()
    _numbers.clear()


def outgoing(destination: int, x: Tensor) -> mailbox.Outgoing | None:
    """Return the mailbox for a message to a rank of the world; None if it needs torch.distributed."""
    return joined[0].outgoing(destination) if joined and _fits(x) else None


def incoming(source: int, x: Tensor, tag: int, group: Group) -> Callable[[], mailbox.Arrival] | None:
    """Return what asks for a message of the group into `x`; None if it needs torch.distributed."""
    box = joined[0].incoming(ranks_of(group)[source]) if joined and _fits(x) else None
    if box is None:
        return None
    elsewhere = partial(dist.recv, x, group=group, tag=tag_elsewhere(tag), group_src=source)
    return partial(box.expect, (number_of(group), tag), x, partial(limit_of, group), elsewhere)


def _fits(x: Tensor) -> bool:
    small = x.device.type == "cpu" and x.numel() * x.element_size() <= LARGEST
    return small and preferred("send") == "shared_memory"


def identity(source: int, destination: int, tag: int, group: Group) -> MessageIdentity:
    """Return how both sides of a message know it; the ranks are counted in the group."""
    ranks = ranks_of(group)
    return MessageIdentity(ranks[source], ranks[destination], tag, number_of(group))


def number_of(group: Group) -> int:
    """Return a number of the group, the same on all its ranks."""
    whole = process_group(group)
    number = _numbers.get(whole)
    if number is None:
        digest = hashlib.blake2b(whole.group_name.encode(), digest_size=8).digest()
        number = _numbers.put(whole, int.from_bytes(digest, "little", signed=True))
    return number


def tag_elsewhere(tag: int) -> int:
    """Return the tag for a message that found no room; its own tag may be that of a larger message."""
    return 2**31 - 1 - tag


class Mailboxes:
    """This rank's mailboxes, and those of the ranks that it sends to, in a world of `ranks`."""

    def __init__(self, store: Store, own: int, ranks: int) -> None:
        self._store, self._own = store, own
        self._process, self._descriptor = host.this_process(), _make_file(ranks)
        self._incoming: dict[int, mailbox.Incoming | None] = {}
        self._outgoing: dict[int, mailbox.Outgoing | None] = {}
        self._lock = threading.Lock()
        self._second_store: Store | None = None
        if self._descriptor >= 0:
            self._patient = ranks > len(os.sched_getaffinity(0))
            self._memory = memoryview(mmap.mmap(self._descriptor, ranks * mailbox.PITCH))
            for rank in range(ranks):
                mailbox.prepare(self._memory[rank * mailbox.PITCH :])
        process = self._process
        fields = (*process.host, process.id, process.started, self._descriptor)
        store.set(_key(own), " ".join(map(str, fields)))

    def incoming(self, source: int) -> mailbox.Incoming | None:
        """Return the mailbox for a rank's messages; None if they need torch.distributed."""
        with self._lock:
            if source not in self._incoming:
                self._incoming[source] = self._make(source)
            return self._incoming[source]

    def outgoing(self, destination: int) -> mailbox.Outgoing | None:
        """Return the mailbox for messages to a rank; None if they need torch.distributed."""
        with self._lock:
            if destination not in self._outgoing:
                self._outgoing[destination] = self._open(destination)
            return self._outgoing[destination]

    def close(self) -> None:
        """Close the files."""
        for box in self._outgoing.values():
            if box is not None:
                box.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _make(self, source: int) -> mailbox.Incoming | None:
        sender, _ = self._announced(source)
        if self._descriptor < 0 or sender.host != self._process.host:
            return None
        memory = self._memory[source * mailbox.PITCH :][: mailbox.PITCH]
        refused = partial(self._connection().check, [_refusal(source, self._own)])
        why_absent = partial(returned_ranks.why_absent, source)
        return mailbox.Incoming(memory, source, sender, self._patient, refused, why_absent)

    def _open(self, destination: int) -> mailbox.Outgoing | None:
        receiver, descriptor = self._announced(destination)
        if descriptor < 0 or receiver.host != self._process.host:
            return None
        box = mailbox.Outgoing(f"/proc/{receiver.id}/fd/{descriptor}", self._own * mailbox.PITCH)
        if box.refused:
            self._connection().set(_refusal(self._own, destination), "")
        return box

    def _announced(self, rank: int) -> tuple[Process, int]:
        """Return the process and the file descriptor that a rank has announced."""
        fields = self._connection().get(_key(rank)).split()
        a, b, id, started, descriptor = map(int, fields)
        return Process((a, b), id, started), descriptor

    def _connection(self) -> Store:
        """Return a second connection to the store: torch locks its own while it waits for other ranks."""
        if self._second_store is None:
            self._second_store = self._store.clone()  # type: ignore[attr-defined]
        return self._second_store


def _make_file(ranks: int) -> int:
    """Make the file of a rank's mailboxes, almost without memory yet; -1 if that fails."""
    if not host.has_semaphores():
        return -1
    ranges = [(rank * mailbox.PITCH, 2 * host.LINE) for rank in range(ranks)]
    return host.make_file(ranks * mailbox.PITCH, ranges)


def _key(rank: int) -> str:
    return f"mailboxes/{rank}"


def _refusal(source: int, destination: int) -> str:
    return f"mailboxes/{source}>{destination}"
