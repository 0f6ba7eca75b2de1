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
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from minidist.comm import returned_ranks
from minidist.comm.errors import FOLLOWS
from minidist.comm.group_table import GroupTable
from minidist.comm.transport import mailbox, mailbox_receiver, segments, semaphores
from minidist.comm.transport.hosts import Process, this_process
from minidist.comm.work import Group, limit_of, process_group, ranks_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LARGEST = 2**22
"""Bytes of the largest message that goes through a mailbox. Both sides know the size, so they agree."""

_world: list[Mailboxes] = []
"""The mailboxes of the world that this process has joined, if any."""
_numbers: GroupTable[int] = GroupTable()


def start(store: Store, own: int, ranks: int) -> None:
    """Make this rank's mailboxes and announce them, before the world is complete."""
    stop()
    if ranks > 1:
        _world.append(Mailboxes(store, own, ranks))


def stop() -> None:
    """Forget the mailboxes: their world has ended."""
    while _world:
        _world.pop().close()
    _numbers.clear()


def incoming(source: int, x: torch.Tensor) -> mailbox_receiver.Incoming | None:
    """Return the mailbox for a message from a rank of the world; None if it needs torch.distributed."""
    return _world[0].incoming(source) if _world and _fits(x) else None


def outgoing(destination: int, x: torch.Tensor) -> mailbox.Outgoing | None:
    """Return the mailbox for a message to a rank of the world; None if it needs torch.distributed."""
    return _world[0].outgoing(destination) if _world and _fits(x) else None


def _fits(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.numel() * x.element_size() <= LARGEST


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


class Arrival:
    """A message to receive into contiguous `x`, with `wait` and `is_completed` like torch's handles.

    source: the sender's rank in the group.
    """

    def __init__(
        self, box: mailbox_receiver.Incoming, x: torch.Tensor, group: Group, source: int, tag: int
    ) -> None:
        self._box, self._x, self._group, self._source, self._tag = box, x, group, source, tag
        self._key = number_of(group), tag
        self._expected = box.expect(self._key, x)

    def wait(self) -> None:
        """Wait until the message has arrived.

        Raises:
            RuntimeError: the sender has ended, is late, has failed, or has sent another size.
        """
        self._box.wait(self._key, self._expected, partial(limit_of, self._group))
        if self._expected.failed:
            rank = ranks_of(self._group)[self._source]
            raise RuntimeError(f"rank {rank} failed, and this belongs to what it did{FOLLOWS}")
        if self._expected.elsewhere:
            tag = tag_elsewhere(self._tag)
            dist.recv(self._x, group=self._group, tag=tag, group_src=self._source)

    def cancel(self) -> None:
        """Stop asking for it."""
        self._box.cancel(self._key, self._expected)

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        self._box.look()
        return self._expected.came >= 0 and not self._expected.elsewhere


class Mailboxes:
    """This rank's mailboxes, and those of the ranks that it sends to, in a world of `ranks`."""

    def __init__(self, store: Store, own: int, ranks: int) -> None:
        self._store, self._own = store, own
        self._process, self._descriptor = this_process(), _created(ranks)
        self._incoming: dict[int, mailbox_receiver.Incoming | None] = {}
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

    def incoming(self, source: int) -> mailbox_receiver.Incoming | None:
        """Return the mailbox for a rank's messages; None if they need torch.distributed."""
        with self._lock:
            if source not in self._incoming:
                self._incoming[source] = self._made(source)
            return self._incoming[source]

    def outgoing(self, destination: int) -> mailbox.Outgoing | None:
        """Return the mailbox for messages to a rank; None if they need torch.distributed."""
        with self._lock:
            if destination not in self._outgoing:
                self._outgoing[destination] = self._opened(destination)
            return self._outgoing[destination]

    def close(self) -> None:
        """Close the files."""
        for box in self._outgoing.values():
            if box is not None:
                box.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _made(self, source: int) -> mailbox_receiver.Incoming | None:
        sender, _ = self._announced(source)
        if self._descriptor < 0 or sender.host != self._process.host:
            return None
        memory = self._memory[source * mailbox.PITCH :][: mailbox.PITCH]
        refused = partial(self._connection().check, [_refusal(source, self._own)])
        why_absent = partial(returned_ranks.why_absent, source)
        return mailbox_receiver.Incoming(memory, sender, self._patient, refused, why_absent)

    def _opened(self, destination: int) -> mailbox.Outgoing | None:
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


def _created(ranks: int) -> int:
    """Make the file of a rank's mailboxes, almost without memory yet; -1 if that fails."""
    if not semaphores.available():
        return -1
    ranges = [(rank * mailbox.PITCH, 2 * semaphores.LINE) for rank in range(ranks)]
    return segments.created(ranks * mailbox.PITCH, ranges)


def _key(rank: int) -> str:
    return f"mailboxes/{rank}"


def _refusal(source: int, destination: int) -> str:
    return f"mailboxes/{source}>{destination}"
