"""The receiver's end of a mailbox; see `mailbox.py`."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minidist.comm.transport.hosts import Process
from minidist.comm.transport.mailbox import CONTROL, ELSEWHERE, FAILED, RECORD, RECORDS, RECORDS_START, Key
from minidist.comm.transport.semaphores import LINE, SPINS, Semaphore, address_of


@dataclass(eq=False)
class Expected:
    """A message that the receiver has asked for."""

    x: torch.Tensor  # where it goes
    size: int  # bytes of x
    came: int = -1  # bytes that the sender sent; -1 before it did
    elsewhere: bool = False  # it comes through torch.distributed
    failed: bool = False  # the sender has failed and does not send it


class Incoming:
    """The receiver's end.

    patient: sleep at once, without spinning, because there are more ranks than cores.
    refused: returns whether the sender has found that it cannot use the mailbox. why_absent: returns why the
        sender will send no more, or "".
    """

    def __init__(
        self,
        memory: memoryview,
        sender: Process,
        patient: bool,
        refused: Callable[[], bool],
        why_absent: Callable[[], str],
    ) -> None:
        self._memory, self._sender, self._refused = memory, sender, refused
        self._why_absent = why_absent
        self._written, self._taken = Semaphore(memory), Semaphore(memory[LINE:])
        self._spins = 0 if patient else SPINS
        self._count = 0  # of records taken
        self._expected: dict[Key, deque[Expected]] = {}
        self._early: dict[Key, deque[bytes | int | None]] = {}  # arrived before anybody asked; see `_give`
        self._lock = threading.Lock()

    def expect(self, key: Key, x: torch.Tensor) -> Expected:
        """Ask for the next message of a key that nobody has asked for yet, into a contiguous tensor."""
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
        """Stop asking. The message then goes to whoever asks next."""
        with self._lock:
            asking = self._expected.get(key)
            if expected.came < 0 and asking is not None:
                asking.remove(expected)

    def look(self) -> None:
        """Take the messages that have arrived, without waiting."""
        while self._written.try_wait():
            self._take()

    def wait(self, key: Key, expected: Expected, limit: Callable[[], float]) -> None:
        """Wait for what `expect` returned. limit: returns the seconds to wait.

        Raises:
            RuntimeError: the sender has ended, or does not send in that time; or the size differs.
        """
        try:
            self._wait(expected, limit)
        except BaseException:
            self.cancel(key, expected)
            raise
        if expected.came != expected.size:
            raise RuntimeError(
                f"the message that came has {expected.came} bytes, and {expected.size} were expected; give "
                "the same shape and dtype to the send and the receive"
            )

    def _wait(self, expected: Expected, limit: Callable[[], float]) -> None:
        spins, begun, reason = self._spins, time.monotonic(), ""
        while expected.came < 0:
            if self._written.try_wait():
                self._take()
            elif spins > 0:
                spins -= 1
                os.sched_yield()
            elif self._written.timed_wait():
                self._take()
            elif not self._count and self._refused():
                expected.came, expected.elsewhere = expected.size, True
            elif reason:
                raise RuntimeError(reason)
            elif reason := self._why_gone():
                continue  # it may have sent just before, and another thread may have that in its hands
            elif time.monotonic() - begun > limit():
                raise RuntimeError(f"timed out after {limit():g} s waiting for a message")

    def _why_gone(self) -> str:
        """Why no message will come any more; "" if one may."""
        if not self._sender.alive():
            return "connection closed by peer: the sender's process has ended"
        return self._why_absent()

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
                _give(message, asking.popleft())
            else:
                kept = bytes(message) if isinstance(message, memoryview) else message
                self._early.setdefault((group, tag), deque()).append(kept)
            self._count += 1
            self._taken.post()


def _give(message: memoryview | bytes | int | None, expected: Expected) -> None:
    """Copy a message to where it is expected, unless it has another size.

    message: its bytes; only its size if it comes elsewhere; None if the sender has failed.
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
