"""A mailbox: what one rank sends another of its host, through memory that both map.

It is a ring of records, which say what has come, and a ring of bytes. The sender copies a tensor in and goes
on; the receiver copies it out where it asks for it. So a message costs two copies, and no third thread works
on it, as one of gloo's would, on a core on which a rank computes. Two semaphores order all of it: one has a
token for each record that has come, the other for each that is gone.

A message that finds no room goes another way, as its record says. Messages of one key arrive in order. A
record may also say that no more will come, since the sender has failed; who waits is then told at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minidist.comm.transport.hosts import Process
from minidist.comm.transport.semaphores import LINE, LOOKS, Tokens, address_of

RECORDS = 1024
"""Messages in a mailbox at most."""
CAPACITY = 2**24
"""Bytes of messages in a mailbox at most; only what was ever used of them takes memory."""
CONTROL = mmap.ALLOCATIONGRANULARITY + RECORDS * 32
"""Bytes before the messages: the semaphores, and the records."""
PITCH = -(-(CONTROL + CAPACITY) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
"""Bytes from one mailbox to the next."""

_RECORD = struct.Struct("<qqqq")  # bytes, the first one's place or one of those below, and the key
_RECORDS = mmap.ALLOCATIONGRANULARITY  # where they begin
_ELSEWHERE, _FAILED = -1, -2
_AT_ONCE = 2**18  # bytes of memory asked for at a time

Key = tuple[int, int]
"""Which messages between two ranks: a number for the group, and the tag."""


def prepare(memory: memoryview) -> None:
    """Make the semaphores of a mailbox, in memory that is all zeros."""
    for place in (0, LINE):
        Tokens.prepare(memory[place:])


class Outgoing:
    """The sender's end.

    Args:
        descriptor: of the file that holds the receiver's mailboxes.
        start: the first byte of this one there.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor, self._messages = descriptor, start + CONTROL
        # A write where memory has run out would end the process; this says so at once.
        os.posix_fallocate(descriptor, start, CONTROL)
        self._backed = 0
        self._memory = memoryview(mmap.mmap(descriptor, PITCH, offset=start))
        self._address = address_of(self._memory) + CONTROL
        self._come, self._gone = Tokens(self._memory), Tokens(self._memory[LINE:])
        self._sent = 0
        # Places are counted on from lap to lap of the ring, so that their differences are what is in use.
        self._next = self._oldest = 0
        self._ends: deque[int] = deque()  # of each message that is not gone
        self._lock = threading.Lock()

    def put(self, key: Key, x: torch.Tensor, limit: Callable[[], float]) -> bool:
        """Send a contiguous tensor, which may change from then on.

        Args:
            key: which messages this one is the next of.
            x: at most `CAPACITY` bytes.
            limit: gives the seconds to wait while the receiver takes none of `RECORDS` messages.

        Returns:
            False where there was no room, so that it has to be sent another way.

        Raises:
            RuntimeError: it takes none in that time.
        """
        size = x.numel() * x.element_size()
        with self._lock:
            self._wait_for_record(limit)
            place = self._room(size)
            if place >= 0:
                ctypes.memmove(self._address + place, x.data_ptr(), size)
            self._record(size, place, key)
        return place >= 0

    def fail(self, key: Key, limit: Callable[[], float]) -> None:
        """Say that this rank has failed and sends no more messages of a key; see `put`."""
        with self._lock:
            self._wait_for_record(limit)
            self._record(0, _FAILED, key)

    def _record(self, size: int, place: int, key: Key) -> None:
        """Write the next record, and tell of it."""
        at = _RECORDS + self._sent % RECORDS * _RECORD.size
        _RECORD.pack_into(self._memory, at, size, place, *key)
        self._sent += 1
        self._ends.append(self._next)
        self._come.post()

    def close(self) -> None:
        """Let go of the file. Memory that is mapped stays until this object goes."""
        os.close(self._descriptor)

    def _wait_for_record(self, limit: Callable[[], float]) -> None:
        """Let go of what is gone, and wait where everything is full."""
        begun = time.monotonic()
        while self._gone.look():
            self._oldest = self._ends.popleft()
        while len(self._ends) == RECORDS:
            if self._gone.sleep():
                self._oldest = self._ends.popleft()
            elif time.monotonic() - begun > limit():
                raise RuntimeError(f"timed out with {RECORDS} messages that the receiver has not taken")
        if not self._ends:
            self._next = self._oldest = 0  # where the caches still have the memory

    def _room(self, size: int) -> int:
        """Make room for a message, and return its place; _ELSEWHERE where there is none."""
        first = self._next
        if first % CAPACITY + size > CAPACITY:
            first += CAPACITY - first % CAPACITY
        end = first + -(-size // LINE) * LINE
        if end - self._oldest > CAPACITY:
            return _ELSEWHERE
        needed = min(end, CAPACITY)
        if needed > self._backed:
            more = min(CAPACITY, -(-needed // _AT_ONCE) * _AT_ONCE)
            try:
                os.posix_fallocate(self._descriptor, self._messages, more)
            except OSError:
                return _ELSEWHERE
            self._backed = more
        self._next = end
        return first % CAPACITY


class Closed(Outgoing):
    """The sender's end of a mailbox that it cannot use: everything has to go another way."""

    def __init__(self) -> None:
        """Hold nothing."""

    def put(self, key: Key, x: torch.Tensor, limit: Callable[[], float]) -> bool:
        """Send nothing: False."""
        return False

    def fail(self, key: Key, limit: Callable[[], float]) -> None:
        """Nobody can be told."""

    def close(self) -> None:
        """There is nothing to let go of."""


@dataclass(eq=False)
class Expected:
    """A message that is asked for."""

    x: torch.Tensor  # that it goes into
    size: int  # of that, bytes
    came: int = -1  # bytes that the sender sent; -1 before that
    elsewhere: bool = False  # it comes another way
    failed: bool = False  # it does not come: the sender has failed


class Incoming:
    """The receiver's end.

    Args:
        memory: of the mailbox.
        sender: the process that sends.
        patient: sleep at once, since ranks outnumber cores.
        refused: tells whether the sender has found that it cannot use the mailbox.
    """

    def __init__(
        self, memory: memoryview, sender: Process, patient: bool, refused: Callable[[], bool]
    ) -> None:
        self._memory, self._sender, self._refused = memory, sender, refused
        self._come, self._gone = Tokens(memory), Tokens(memory[LINE:])
        self._looks = 0 if patient else LOOKS
        self._taken = 0
        self._expected: dict[Key, deque[Expected]] = {}
        self._early: dict[Key, deque[bytes | int | None]] = {}  # came before they were asked for; see `_give`
        self._lock = threading.Lock()

    def expect(self, key: Key, x: torch.Tensor) -> Expected:
        """Ask for the next message of a key that nobody has asked for, into a contiguous tensor."""
        expected = Expected(x, x.numel() * x.element_size())
        with self._lock:
            early = self._early.get(key)
            if early:
                _give(early.popleft(), expected)
                if not early:
                    del self._early[key]
            else:
                self._expected.setdefault(key, deque()).append(expected)
        return expected

    def cancel(self, key: Key, expected: Expected) -> None:
        """Ask no longer: the next message is for who asks next."""
        with self._lock:
            asking = self._expected.get(key)
            if expected.came < 0 and asking is not None:
                asking.remove(expected)

    def look(self) -> None:
        """Take what has come, without waiting."""
        while self._come.look():
            self._take()

    def wait(self, key: Key, expected: Expected, limit: Callable[[], float]) -> None:
        """Wait until what is expected has come.

        Args:
            key: of it.
            expected: as `expect` gave it.
            limit: gives the seconds to wait.

        Raises:
            RuntimeError: its sender has ended, or does not send in that time; or what came has another size.
        """
        try:
            self._wait(expected, limit)
        except BaseException:
            self.cancel(key, expected)
            raise
        if expected.came != expected.size:
            raise RuntimeError(
                f"the message that came has {expected.came} bytes, and {expected.size} were expected; the "
                "sender and the receiver have to name the same shape and dtype"
            )

    def _wait(self, expected: Expected, limit: Callable[[], float]) -> None:
        looks, begun = self._looks, time.monotonic()
        while expected.came < 0:
            if self._come.look():
                self._take()
            elif looks > 0:
                looks -= 1
                os.sched_yield()
            elif self._come.sleep():
                self._take()
            elif not self._taken and self._refused():
                expected.came, expected.elsewhere = expected.size, True
            elif not self._sender.alive():
                if not self._come.look():  # else it has sent, and then ended at once
                    raise RuntimeError("connection closed by peer: the sender's process has ended")
                self._take()
            elif time.monotonic() - begun > limit():
                raise RuntimeError(f"timed out after {limit():g} s waiting for a message")

    def _take(self) -> None:
        """Take the next record, whose token this thread has, and give the message to who asked for it."""
        with self._lock:
            at = _RECORDS + self._taken % RECORDS * _RECORD.size
            size, place, *key = _RECORD.unpack_from(self._memory, at)
            message: memoryview | int | None = None
            if place != _FAILED:
                message = size if place == _ELSEWHERE else self._memory[CONTROL + place :][:size]
            asking = self._expected.get((key[0], key[1]))
            if asking:
                _give(message, asking.popleft())
            else:
                kept = bytes(message) if isinstance(message, memoryview) else message
                self._early.setdefault((key[0], key[1]), deque()).append(kept)
            self._taken += 1
            self._gone.post()


def _give(message: memoryview | bytes | int | None, expected: Expected) -> None:
    """Copy a message to where it is expected, unless it has another size.

    One that comes another way is but a size; None says that the sender has failed.
    """
    if message is None:
        expected.failed, expected.came = True, expected.size
        return
    if isinstance(message, int):
        expected.elsewhere, expected.came = True, message
        return
    if len(message) == expected.size and message:
        source = message if isinstance(message, bytes) else address_of(message)
        ctypes.memmove(expected.x.data_ptr(), source, expected.size)
    expected.came = len(message)
