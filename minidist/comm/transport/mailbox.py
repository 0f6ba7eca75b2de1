"""A mailbox, in which one rank sends messages to another of its host through memory that both map.

A mailbox has a ring of records, which describe the messages, and a ring of bytes. The sender copies a tensor
in and goes on; the receiver copies it out when it asks for it. So a message costs two copies, and no third
thread, like gloo's, takes time on a core on which a rank computes. Two semaphores order everything: one has a
token for each record that was written, the other for each that was taken.

A message that finds no room goes elsewhere, through torch.distributed, and its record says so. Messages of
one key arrive in order. A record may also say that the sender has failed and sends no more of that key; the
receiver that waits then learns it at once.

Every rank makes one unnamed file with a mailbox for each other rank, and announces it in the world's store as
it joins. A sender opens the receiver's file at its first message. If it cannot, it says so in the store,
where a receiver that waits for a first message looks. Messages larger than `LARGEST`, of other hosts or of a
GPU go through torch.distributed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from minidist.comm.errors import FOLLOWS
from minidist.comm.ledgers import MessageIdentity
from minidist.comm.transport import ipc
from minidist.comm.transport.ipc import LINE, SPINS, Process, Semaphore, address_of, padded
from minidist.comm.work import Group, known, limit_of, preferred, ranks_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LARGEST = 2**22
"""Bytes of the largest message that goes through a mailbox. Both sides know the size, so they agree."""

RECORDS = 1024
"""The most messages in a mailbox."""
CAPACITY = 2**24
"""The most bytes of messages in a mailbox. Only bytes that were ever used take memory."""
RECORD = struct.Struct("<qqqq")
"""A record: bytes of the message, its offset (or ELSEWHERE or FAILED), and its key."""
ELSEWHERE, FAILED = -1, -2
RECORDS_START = mmap.PAGESIZE
"""Where the records begin, after the semaphores."""
CONTROL = RECORDS_START + RECORDS * RECORD.size
"""Bytes before the messages."""
PITCH = padded(CONTROL + CAPACITY)
"""Bytes from one mailbox to the next."""

_ALLOCATE = 2**18  # bytes of memory to ask for at a time

Key = tuple[int, int]
"""Which messages between two ranks: a number of the group, and the tag."""


def prepare(memory: memoryview) -> None:
    """Make the semaphores of a mailbox, in memory that is all zeros."""
    for offset in (0, LINE):
        Semaphore.prepare(memory[offset:])


class Outgoing:
    """The sender's end, from byte `start` on in the file with the receiver's mailboxes.

    It is `refused` if it could not be opened, or memory was short; every message then goes elsewhere.
    """

    def __init__(self, path: str, start: int) -> None:
        self._descriptor, self._messages, self.refused = -1, start + CONTROL, False
        try:
            self._descriptor = os.open(path, os.O_RDWR)
            # A write without memory behind it would kill the process; this raises an error at once.
            os.posix_fallocate(self._descriptor, start, CONTROL)
            self._memory = memoryview(mmap.mmap(self._descriptor, PITCH, offset=start))
        except OSError:
            self.refused = True
            return
        self._allocated = 0
        self._address = address_of(self._memory) + CONTROL
        self._written, self._taken = Semaphore(self._memory), Semaphore(self._memory[LINE:])
        self._sent = 0
        # Offsets go on counting from lap to lap of the ring, so that their differences are the bytes in use.
        self._next = self._oldest = 0
        self._ends: deque[int] = deque()  # of each message that was not taken yet
        self._lock = threading.Lock()

    def put(self, key: Key, x: torch.Tensor, limit: Callable[[], float]) -> bool:
        """Send a contiguous tensor of at most `CAPACITY` bytes, which may change afterwards.

        limit: returns the seconds to wait while `RECORDS` messages are not taken; after them, a RuntimeError.
        Returns False if there was no room; the caller then sends the tensor elsewhere.
        """
        if self.refused:
            return False
        size = x.numel() * x.element_size()
        with self._lock:
            self._wait_for_record(limit)
            offset = self._room(size)
            if offset >= 0:
                ctypes.memmove(self._address + offset, x.data_ptr(), size)
            self._record(size, offset, key)
        return offset >= 0

    def fail(self, key: Key, limit: Callable[[], float]) -> None:
        """Say that this rank has failed and sends no more messages of a key. limit: as of `put`."""
        if self.refused:
            return
        with self._lock:
            self._wait_for_record(limit)
            self._record(0, FAILED, key)

    def close(self) -> None:
        """Close the file. Its memory stays mapped as long as this object lives."""
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _record(self, size: int, offset: int, key: Key) -> None:
        """Write the next record, and post its token."""
        at = RECORDS_START + self._sent % RECORDS * RECORD.size
        RECORD.pack_into(self._memory, at, size, offset, *key)
        self._sent += 1
        self._ends.append(self._next)
        self._written.post()

    def _wait_for_record(self, limit: Callable[[], float]) -> None:
        """Free what was taken, and wait while all records are in use."""
        begun = time.monotonic()
        while self._taken.try_wait():
            self._oldest = self._ends.popleft()
        while len(self._ends) == RECORDS:
            if self._taken.timed_wait():
                self._oldest = self._ends.popleft()
            elif time.monotonic() - begun > limit():
                raise RuntimeError(f"timed out with {RECORDS} messages that the receiver has not taken")
        if not self._ends:
            self._next = self._oldest = 0  # begin again in memory that the caches still hold

    def _room(self, size: int) -> int:
        """Make room for a message, and return its offset; ELSEWHERE if there is none."""
        first = self._next
        if first % CAPACITY + size > CAPACITY:
            first += CAPACITY - first % CAPACITY
        end = first + -(-size // LINE) * LINE
        if end - self._oldest > CAPACITY:
            return ELSEWHERE
        needed = min(end, CAPACITY)
        if needed > self._allocated:
            more = min(CAPACITY, -(-needed // _ALLOCATE) * _ALLOCATE)
            try:
                os.posix_fallocate(self._descriptor, self._messages, more)
            except OSError:
                return ELSEWHERE
            self._allocated = more
        self._next = end
        return first % CAPACITY


class Arrival:
    """A message that the receiver has asked for, with `wait` and `is_completed` like torch's handles.

    limit: returns the seconds to wait. receive_elsewhere: receives it through torch.distributed.
    """

    def __init__(
        self,
        box: Incoming,
        key: Key,
        x: torch.Tensor,
        limit: Callable[[], float],
        receive_elsewhere: Callable[[], object],
    ) -> None:
        self.box, self.key, self.x, self.limit = box, key, x, limit
        self.size = x.numel() * x.element_size()
        self.came = -1  # bytes that the sender sent; -1 before it did
        self.elsewhere = False  # it comes through torch.distributed
        self._failed = False  # the sender has failed and does not send it
        self._receive_elsewhere = receive_elsewhere

    def wait(self) -> None:
        """Wait until the message has arrived.

        Raises:
            RuntimeError: the sender has ended, is late, has failed, or has sent another size.
        """
        try:
            self.box.wait(self)
        except BaseException:
            self.cancel()
            raise
        if self.came != self.size:
            raise RuntimeError(
                f"the message that came has {self.came} bytes, and {self.size} were expected; give the same "
                "shape and dtype to the send and the receive"
            )
        if self._failed:
            raise RuntimeError(f"rank {self.box.source} failed, and this belongs to what it did{FOLLOWS}")
        if self.elsewhere:
            self._receive_elsewhere()

    def cancel(self) -> None:
        """Stop asking for it. The message then goes to whoever asks next."""
        self.box.cancel(self)

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        self.box.look()
        return self.came >= 0 and not self.elsewhere

    def deliver(self, message: memoryview | bytes | int | None) -> None:
        """Copy a message to its place, unless it has another size.

        message: its bytes; only its size if it comes elsewhere; None if the sender has failed.
        """
        if message is None:
            self._failed, self.came = True, self.size
        elif isinstance(message, int):
            self.elsewhere, self.came = True, message
        else:
            if len(message) == self.size and message:
                source = message if isinstance(message, bytes) else address_of(message)
                ctypes.memmove(self.x.data_ptr(), source, self.size)
            self.came = len(message)


class Incoming:
    """The receiver's end.

    source, sender: the sender's rank in the world, and its process. patient: sleep at once, without spinning,
    because there are more ranks than cores. refused: returns whether the sender has found that it cannot use
    the mailbox.
    """

    def __init__(
        self,
        memory: memoryview,
        source: int,
        sender: Process,
        patient: bool,
        refused: Callable[[], bool],
    ) -> None:
        self._memory, self.source, self._sender, self._refused = memory, source, sender, refused
        self._written, self._taken = Semaphore(memory), Semaphore(memory[LINE:])
        self._spins = 0 if patient else SPINS
        self._count = 0  # of records taken
        self._expected: dict[Key, deque[Arrival]] = {}
        self._early: dict[Key, deque[bytes | int | None]] = {}  # arrived before anybody asked; see `deliver`
        self._lock = threading.Lock()

    def expect(
        self,
        key: Key,
        x: torch.Tensor,
        limit: Callable[[], float],
        receive_elsewhere: Callable[[], object],
    ) -> Arrival:
        """Ask for the next message of a key that nobody has asked for yet, into a contiguous tensor."""
        arrival = Arrival(self, key, x, limit, receive_elsewhere)
        with self._lock:
            early = self._early.get(key)
            if early:
                arrival.deliver(early.popleft())
                if not early:
                    del self._early[key]
            else:
                self._expected.setdefault(key, deque()).append(arrival)
        return arrival

    def cancel(self, arrival: Arrival) -> None:
        """Stop asking for what `expect` returned."""
        with self._lock:
            asking = self._expected.get(arrival.key)
            if arrival.came < 0 and asking is not None:
                asking.remove(arrival)

    def look(self) -> None:
        """Take the messages that have arrived, without waiting."""
        while self._written.try_wait():
            self._take()

    def wait(self, arrival: Arrival) -> None:
        """Wait for what `expect` returned. RuntimeError if the sender has ended, or sends nothing in time."""
        spins, begun, reason = self._spins, time.monotonic(), ""
        while arrival.came < 0:
            if self._written.try_wait():
                self._take()
            elif spins > 0:
                spins -= 1
                os.sched_yield()
            elif self._written.timed_wait():
                self._take()
            elif not self._count and self._refused():
                arrival.came, arrival.elsewhere = arrival.size, True
            elif reason:
                raise RuntimeError(reason)
            elif reason := ipc.why_gone(self.source, self._sender):
                continue  # it may have sent just before, and another thread may have that in its hands
            elif time.monotonic() - begun > arrival.limit():
                raise RuntimeError(f"timed out after {arrival.limit():g} s waiting for a message")

    def _take(self) -> None:
        """Take the next record, for a token that this thread has, and deliver or keep its message."""
        with self._lock:
            at = RECORDS_START + self._count % RECORDS * RECORD.size
            size, offset, group, tag = RECORD.unpack_from(self._memory, at)
            message: memoryview | int | None = None
            if offset != FAILED:
                message = size if offset == ELSEWHERE else self._memory[CONTROL + offset :][:size]
            asking = self._expected.get((group, tag))
            if asking:
                asking.popleft().deliver(message)
            else:
                kept = bytes(message) if isinstance(message, memoryview) else message
                self._early.setdefault((group, tag), deque()).append(kept)
            self._count += 1
            self._taken.post()


# The mailboxes of a world

joined: list[Mailboxes] = []
"""The mailboxes of the world that this process has joined, if any."""


def start(store: Store, own: int, ranks: int) -> None:
    """Make this rank's mailboxes and announce them, before the world is complete."""
    stop()
    if ranks > 1:
        joined.append(Mailboxes(store, own, ranks))


def stop() -> None:
    """Forget the mailboxes: their world has ended."""
    while joined:
        joined.pop().close()


def outgoing(destination: int, x: torch.Tensor) -> Outgoing | None:
    """Return the mailbox for a message to a rank of the world; None if it needs torch.distributed."""
    return joined[0].outgoing(destination) if joined and _fits(x) else None


def incoming(source: int, x: torch.Tensor, tag: int, group: Group) -> Callable[[], Arrival] | None:
    """Return what asks for a message of the group into `x`; None if it needs torch.distributed."""
    box = joined[0].incoming(ranks_of(group)[source]) if joined and _fits(x) else None
    if box is None:
        return None
    elsewhere = partial(dist.recv, x, group=group, tag=tag_elsewhere(tag), group_src=source)
    return partial(box.expect, (known(group).number, tag), x, partial(limit_of, group), elsewhere)


def _fits(x: torch.Tensor) -> bool:
    small = x.device.type == "cpu" and x.numel() * x.element_size() <= LARGEST
    return small and preferred("send") == "shared_memory"


def identity(source: int, destination: int, tag: int, group: Group) -> MessageIdentity:
    """Return how both sides of a message know it; the ranks are counted in the group."""
    record = known(group)
    return MessageIdentity(record.ranks[source], record.ranks[destination], tag, record.number)


def tag_elsewhere(tag: int) -> int:
    """Return the tag for a message that found no room; its own tag may be that of a larger message."""
    return 2**31 - 1 - tag


class Mailboxes:
    """This rank's mailboxes, and those of the ranks that it sends to, in a world of `ranks`."""

    def __init__(self, store: Any, own: int, ranks: int) -> None:
        self._store, self._own = store, own
        self._process, self._descriptor = ipc.this_process(), -1
        self._incoming: dict[int, Incoming | None] = {}
        self._outgoing: dict[int, Outgoing | None] = {}
        self._lock = threading.Lock()
        if ipc.has_semaphores():
            ranges = [(rank * PITCH, 2 * LINE) for rank in range(ranks)]  # almost without memory yet
            self._descriptor = ipc.make_file(ranks * PITCH, ranges)
        if self._descriptor >= 0:
            self._patient = ranks > len(os.sched_getaffinity(0))
            self._memory = memoryview(mmap.mmap(self._descriptor, ranks * PITCH))
            for rank in range(ranks):
                prepare(self._memory[rank * PITCH :])
        store.set(_key(own), pickle.dumps((self._process, self._descriptor)))

    def incoming(self, source: int) -> Incoming | None:
        """Return the mailbox for a rank's messages; None if they need torch.distributed."""
        with self._lock:
            if source not in self._incoming:
                self._incoming[source] = self._make(source)
            return self._incoming[source]

    def outgoing(self, destination: int) -> Outgoing | None:
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

    def _make(self, source: int) -> Incoming | None:
        sender, _ = self._announced(source)
        if self._descriptor < 0 or sender.host != self._process.host:
            return None
        memory = self._memory[source * PITCH :][:PITCH]
        refused = partial(self._connection.check, [_refusal(source, self._own)])
        return Incoming(memory, source, sender, self._patient, refused)

    def _open(self, destination: int) -> Outgoing | None:
        receiver, descriptor = self._announced(destination)
        if descriptor < 0 or receiver.host != self._process.host:
            return None
        box = Outgoing(f"/proc/{receiver.id}/fd/{descriptor}", self._own * PITCH)
        if box.refused:
            self._connection.set(_refusal(self._own, destination), "")
        return box

    def _announced(self, rank: int) -> tuple[Process, int]:
        """Return the process and the file descriptor that a rank has announced."""
        announced: tuple[Process, int] = pickle.loads(self._connection.get(_key(rank)))
        return announced

    @cached_property
    def _connection(self) -> Any:
        """A second connection to the store: torch locks its own while it waits for other ranks."""
        return self._store.clone()


def _key(rank: int) -> str:
    return f"mailboxes/{rank}"


def _refusal(source: int, destination: int) -> str:
    return f"mailboxes/{source}>{destination}"
