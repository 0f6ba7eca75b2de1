"""POSIX semaphores in shared memory, by which processes wait for each other with a time limit.

`ProcessBarrier` gives every rank two semaphores, one for barriers of even number and one for odd. At a
barrier a rank posts to the semaphore of every other rank and takes as many tokens from its own. One semaphore
would not do: a fast rank may come to the next barrier before a slow one has left this one. It cannot reach
the one after that.

A semaphore orders memory on every processor: what was written before the post is seen after the wait. If
every rank has a core, a rank first spins for a fraction of a millisecond and yields the core between tries.
After that, or at once if there are more ranks than cores, it sleeps until the kernel wakes it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
from collections.abc import Callable

LINE = 64
"""Bytes from one semaphore to the next: a cache line, and more than a `sem_t` has on Linux."""
SPINS = 300
"""Times that a rank tries for a token before it sleeps: about 0.1 ms."""
SLICE = 0.05
"""Seconds of sleep after which a rank checks whether its peers are alive."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def available() -> bool:
    """Whether this system has semaphores that processes share."""
    return sys.platform.startswith("linux")


class ProcessBarrier:
    """A barrier of `ranks` processes that map the same `size(ranks)` bytes of memory.

    One of them calls `prepare` on the memory before the others see it.
    patient: sleep at once, without spinning, because there are more ranks than cores.
    """

    def __init__(self, memory: memoryview, own: int, ranks: int, patient: bool) -> None:
        rows = [
            [Semaphore(memory[LINE * (2 * rank + parity) :]) for rank in range(ranks)] for parity in (0, 1)
        ]
        self._semaphore = [row[own] for row in rows]
        self._others = [row[:own] + row[own + 1 :] for row in rows]
        # How often each rank has come. This tells who is missing; tokens do not say whose they are.
        self._counts = memory[2 * LINE * ranks : self.size(ranks)].cast("q")[:: LINE // 8]
        self._own, self._spins = own, 0 if patient else SPINS

    @staticmethod
    def size(ranks: int) -> int:
        """Return the bytes of shared memory that `ranks` need."""
        return 3 * LINE * ranks

    @staticmethod
    def prepare(memory: memoryview, ranks: int) -> None:
        """Make the semaphores, in memory that is all zeros."""
        for number in range(2 * ranks):
            Semaphore.prepare(memory[LINE * number :])

    def wait(self, limit: float, check: Callable[[Callable[[], list[int]]], None]) -> None:
        """Wait until all ranks have come. TimeoutError after `limit`.

        check: called now and then with a function that returns the ranks that are late. It raises if waiting
            for them is pointless.
        """
        count = self._counts[self._own] + 1
        for other in self._others[count % 2]:
            other.post()
        self._counts[self._own] = count  # last: a rank that is counted has posted all its tokens
        own, missing, spins = self._semaphore[count % 2], len(self._others[0]), self._spins
        begun = time.perf_counter()
        while missing:
            if own.try_wait():
                missing -= 1
            elif spins > 0:
                spins -= 1
                os.sched_yield()
            elif own.timed_wait():
                missing -= 1
            else:
                check(lambda: self._late(count))
                if time.perf_counter() - begun > limit:
                    late = ", ".join(map(str, self._late(count)))
                    raise TimeoutError(f"timed out after {limit:g} s waiting for rank {late} of this host")

    def _late(self, count: int) -> list[int]:
        return [rank for rank, came in enumerate(self._counts) if came < count]


class Semaphore:
    """A semaphore at the start of shared memory, by which a process tells another that something happened."""

    def __init__(self, memory: memoryview) -> None:
        self._library, self._address = _library(), address_of(memory)

    @staticmethod
    def prepare(memory: memoryview) -> None:
        """Make the semaphore, without a token, in memory that is all zeros."""
        _library().sem_init(address_of(memory), 1, 0)

    def post(self) -> None:
        """Add a token."""
        self._library.sem_post(self._address)

    def try_wait(self) -> bool:
        """Take a token if there is one; return whether there was."""
        return not self._library.sem_trywait(self._address)

    def timed_wait(self) -> bool:
        """Take a token, and sleep up to `SLICE` for one; return whether one came."""
        until = time.time() + SLICE
        when = _Timespec(int(until), int(until % 1 * 1e9))
        return not self._library.sem_timedwait(self._address, ctypes.byref(when))


def address_of(memory: memoryview) -> int:
    """Return the address of a memory view's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    for function in (library.sem_post, library.sem_trywait):
        function.argtypes = [ctypes.c_void_p]
    library.sem_timedwait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Timespec)]
    library.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    return library
