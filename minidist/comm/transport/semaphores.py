"""Meeting points in shared memory: POSIX semaphores, by which processes wait for each other with a limit.

Every rank has two semaphores, for meetings of even and of odd number. To meet, a rank posts to the
semaphore of each other rank and takes as many tokens from its own. Two are needed, since a fast rank may
come to the next meeting before a slow one has left this; it can't come to the one after that.

A semaphore orders memory on every processor: what was written before the post is seen after the wait.
Where each rank has a core, a rank first looks again and again for a fraction of a millisecond, giving the
core away between looks; after that, or at once where ranks outnumber cores, the kernel wakes it.
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
LOOKS = 300
"""Times that a rank looks for a token before it sleeps: about 0.1 ms."""
SLICE = 0.05
"""Seconds asleep after which a rank sees whether its peers still live."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def available() -> bool:
    """True where this system has semaphores that processes share."""
    return sys.platform.startswith("linux")


class Meeting:
    """Where `ranks` processes, which map the same memory, wait for each other.

    Args:
        memory: of `size(ranks)` bytes; one of them has called `prepare` on it before the others see it.
        own: this process's place among them.
        ranks: how many they are.
        patient: sleep at once, since ranks outnumber cores.
    """

    def __init__(self, memory: memoryview, own: int, ranks: int, patient: bool) -> None:
        library = _library()
        self._library, self._post, self._look = library, library.sem_post, library.sem_trywait
        address = address_of(memory)
        places = [[address + LINE * (2 * rank + parity) for rank in range(ranks)] for parity in (0, 1)]
        self._semaphore = [row[own] for row in places]
        self._others = [[place for rank, place in enumerate(row) if rank != own] for row in places]
        # How often each has come, which tells who is missing; tokens have no names.
        self._counts = memory[2 * LINE * ranks : self.size(ranks)].cast("q")[:: LINE // 8]
        self._own, self._looks = own, 0 if patient else LOOKS

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes of shared memory that `ranks` need."""
        return 3 * LINE * ranks

    @staticmethod
    def prepare(memory: memoryview, ranks: int) -> None:
        """Make the semaphores, in memory that is all zeros."""
        library, address = _library(), address_of(memory)
        for place in range(2 * ranks):
            library.sem_init(address + LINE * place, 1, 0)

    def meet(self, limit: float, check: Callable[[Callable[[], list[int]]], None]) -> float:
        """Wait until all have come; seconds that it took.

        Args:
            limit: seconds to wait.
            check: called from time to time while waiting, with what gives the places of those who have not
                come by then; it raises where waiting for them is pointless.

        Raises:
            TimeoutError: they have not within `limit` seconds.
        """
        count = self._counts[self._own] + 1
        for other in self._others[count % 2]:
            self._post(other)
        self._counts[self._own] = count  # last: who is counted has no token to give any more
        own, missing, look, looks = self._semaphore[count % 2], len(self._others[0]), self._look, self._looks
        begun = time.perf_counter()
        while missing:
            if not look(own):
                missing -= 1
            elif looks > 0:
                looks -= 1
                os.sched_yield()
            elif _asleep(self._library, own):
                missing -= 1
            else:
                check(lambda: self._late(count))
                if time.perf_counter() - begun > limit:
                    raise TimeoutError(f"timed out after {limit:g} s waiting for place {self._late(count)}")
        return time.perf_counter() - begun

    def _late(self, count: int) -> list[int]:
        """The places of those who have not come to a meeting."""
        return [rank for rank, came in enumerate(self._counts) if came < count]


class Tokens:
    """One semaphore, by which a process tells another how often something has happened.

    Args:
        memory: shared memory that begins with a semaphore, on which `prepare` has been called once.
    """

    def __init__(self, memory: memoryview) -> None:
        self._library, self._address = _library(), address_of(memory)

    @staticmethod
    def prepare(memory: memoryview) -> None:
        """Make the semaphore, without a token, in memory that is all zeros."""
        _library().sem_init(address_of(memory), 1, 0)

    def post(self) -> None:
        """Add a token."""
        self._library.sem_post(self._address)

    def look(self) -> bool:
        """Take a token where there is one."""
        return bool(self._library.sem_trywait(self._address) == 0)

    def sleep(self) -> bool:
        """Take a token, and sleep for one in a short while if need be; False where none came."""
        return _asleep(self._library, self._address)


def _asleep(library: ctypes.CDLL, semaphore: int) -> bool:
    """Sleep for a token; False where none came in a while."""
    until = time.time() + SLICE
    when = _Timespec(int(until), int(until % 1 * 1e9))
    return bool(library.sem_timedwait(semaphore, ctypes.byref(when)) == 0)


def address_of(memory: memoryview) -> int:
    """Return where shared memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    for function in (library.sem_post, library.sem_trywait):
        function.argtypes = [ctypes.c_void_p]
    library.sem_timedwait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Timespec)]
    library.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    return library
