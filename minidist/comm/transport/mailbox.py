"""A mailbox, in which one rank sends messages to another of its host through memory that both map.

A mailbox has a ring of records, which describe the messages, and a ring of bytes. The sender copies a tensor
in and goes on; the receiver copies it out when it asks for it (`mailbox_receiver.py`). So a message costs two
copies, and no third thread, like gloo's, takes time on a core on which a rank computes. Two semaphores order
everything: one has a token for each record that was written, the other for each that was taken.

A message that finds no room goes elsewhere, through torch.distributed, and its record says so. Messages of
one key arrive in order. A record may also say that the sender has failed and sends no more of that key; the
receiver that waits then learns it at once.
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

import torch

from minidist.comm.transport.segments import padded
from minidist.comm.transport.semaphores import LINE, Semaphore, address_of

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

    def _record(self, size: int, offset: int, key: Key) -> None:
        """Write the next record, and post its token."""
        at = RECORDS_START + self._sent % RECORDS * RECORD.size
        RECORD.pack_into(self._memory, at, size, offset, *key)
        self._sent += 1
        self._ends.append(self._next)
        self._written.post()

    def close(self) -> None:
        """Close the file. Its memory stays mapped as long as this object lives."""
        if self._descriptor >= 0:
            os.close(self._descriptor)

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
