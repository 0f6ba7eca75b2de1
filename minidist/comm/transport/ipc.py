"""Primitives of inter-process communication on one host: processes, shared memory, semaphores, a barrier.

`shared_memory.py` and `mailbox.py` are built on them. Nothing is decided here: `choose` in collectives.py
says which way a collective takes. A `Process` only tells which ranks are on one host.

Two processes are on one host if they can map the same memory: they run on the same boot of one kernel, in one
namespace of process ids.

Shared memory is a file without a name (`memfd_create`), which the other ranks open through the descriptor of
the rank that made it. So a rank that is killed leaves nothing behind, and no mount's size limits the file.

A process waits for another one at a semaphore, with a time limit. A semaphore orders memory on every
processor: what was written before the post is seen after the wait. If every rank has a core, a rank first
spins for a fraction of a millisecond and yields the core between tries. After that, or at once if there are
more ranks than cores, it sleeps until the kernel wakes it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from minidist.comm import returned_ranks

HOST_VARIABLE = "MINIDIST_HOST"
"""Environment variable for experiments: ranks with different values count as on different hosts."""
LINE = 64
"""Bytes from one semaphore to the next: a cache line, and more than a `sem_t` has on Linux."""
SPINS = 300
"""Times that a rank tries for a token before it sleeps: about 0.1 ms."""
SLICE = 0.05
"""Seconds of sleep after which a rank checks whether its peers are alive."""


# Processes


class Process(NamedTuple):
    """A rank's process, as its peers on the host see it."""

    host: tuple[int, int]  # two checksums of the host's identity
    id: int
    started: int  # clock ticks since the boot; tells it from a later process with the same id

    def alive(self) -> bool:
        """Return False once it has ended, even if nobody has reaped it yet."""
        try:
            state, started = _state(self.id)
        except OSError:
            return False
        return state not in "ZX" and started == self.started


def _state(process: int) -> tuple[str, int]:
    """Return a process's state, a letter, and when it started, in clock ticks since the boot."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def this_process() -> Process:
    """Describe this process to the other ranks."""
    texts = [os.environ.get(HOST_VARIABLE, "")]
    started = 0
    if sys.platform.startswith("linux"):
        texts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
        started = _state(os.getpid())[1]
    else:
        texts.append(os.uname().nodename)
    text = "\n".join(texts).encode()
    return Process((zlib.crc32(text), zlib.adler32(text)), os.getpid(), started)


def why_gone(rank: int, process: Process) -> str:
    """Return why nothing comes from a rank of the world any more, in words; "" if something may."""
    if not process.alive():
        return f"connection closed by peer: the process of rank {rank} has ended"
    return returned_ranks.why_absent(rank)


def processes(group: dist.ProcessGroup) -> list[Process]:
    """Return the processes of a group's ranks, in rank order. All-gathers 32 bytes a rank over gloo."""
    own = this_process()
    row = torch.tensor([*own.host, own.id, own.started])
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return [Process((a, b), id, started) for a, b, id, started in (row.tolist() for row in rows)]


def by_host(everyone: list[Process]) -> list[tuple[int, ...]]:
    """Return the ranks of each host, with hosts in the order of their first rank."""
    hosts: dict[tuple[int, int], list[int]] = {}
    for rank, process in enumerate(everyone):
        hosts.setdefault(process.host, []).append(rank)
    return [tuple(ranks) for ranks in hosts.values()]


# Memory


class Segment(mmap.mmap):
    """A mapped file with a region for each rank, all of them mapped. It lives as long as any tensor in it."""

    pitch: int  # bytes from one region to the next
    number: int  # of the segment, above 0, the same on all its ranks
    owner: int  # number of the `SharedMemory` that it belongs to

    def region(self, rank: int, start: int, size: int) -> torch.Tensor:
        """Return `size` bytes (at least 1) of a rank's region, from byte `start` on, as uint8."""
        return torch.frombuffer(self, dtype=torch.uint8, count=size, offset=rank * self.pitch + start)


_by_address: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()
"""Segments by the address of this rank's region, which is the storage address of its tensors there."""


def share_file(group: dist.ProcessGroup, hosts: Sequence[Sequence[int]], pitch: int) -> int | None:
    """Make a file of zeros on each host, `pitch` bytes a rank, and open it in all ranks there. A collective.

    hosts: the group's ranks, host by host. The ranks talk over gloo. Returns the descriptor of this host's
    file, or None on all ranks if any of them failed.
    """
    rank = dist.get_rank(group)
    members = next(host for host in hosts if rank in host)
    own = -1
    if rank == members[0]:
        own = make_file(pitch * len(members), [(0, pitch * len(members))])
    rows = [torch.empty(2, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, torch.tensor([os.getpid(), own]), group=group)
    if rank != members[0]:
        process, descriptor = rows[members[0]].tolist()
        try:
            own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR) if descriptor >= 0 else -1
        except OSError:
            own = -1
    worst = torch.tensor(own)
    dist.all_reduce(worst, dist.ReduceOp.MIN, group=group)  # also keeps the maker from closing it too early
    if worst >= 0:
        return own
    if own >= 0:
        os.close(own)
    return None


def make_file(size: int, ranges: Sequence[tuple[int, int]]) -> int:
    """Make a file of zeros in memory, with room for these ranges (start, length); -1 if that fails."""
    if not hasattr(os, "memfd_create"):  # not Linux
        return -1
    descriptor = os.memfd_create("minidist")
    try:
        os.ftruncate(descriptor, size)
        for start, length in ranges:
            # A write without memory behind it would kill the process; this raises an error at once.
            os.posix_fallocate(descriptor, start, length)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def map_segment(descriptor: int, ranks: int, pitch: int) -> Segment:
    """Map a file of `ranks` regions and close its descriptor."""
    try:
        segment = Segment(descriptor, ranks * pitch, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
    segment.pitch, segment.number, segment.owner = pitch, 0, 0
    return segment


def tensor_in(segment: Segment, own: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor at the start of this rank's region; `segment_of` then knows it and its slices."""
    size = torch.Size(shape).numel() * dtype.itemsize
    x = segment.region(own, 0, size).view(dtype).view(shape)
    _by_address[x.untyped_storage().data_ptr()] = segment
    return x


def segment_of(x: torch.Tensor) -> Segment | None:
    """Return the segment in which a tensor of this rank lies, if any."""
    return _by_address.get(x.untyped_storage().data_ptr()) if _by_address else None


def padded(size: int) -> int:
    """Round a number of bytes up to whole pages, on which every region begins."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


# Semaphores


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def has_semaphores() -> bool:
    """Whether this system has semaphores that processes share."""
    return sys.platform.startswith("linux")


class Semaphore:
    """A POSIX semaphore at the start of shared memory, by which a process tells another what happened."""

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


class ProcessBarrier:
    """A barrier of `ranks` processes that map the same `size(ranks)` bytes of memory.

    Every rank has two semaphores, one for barriers of even number and one for odd. At a barrier a rank posts
    to the semaphore of every other rank and takes as many tokens from its own. One semaphore would not do: a
    fast rank may come to the next barrier before a slow one has left this one. It cannot reach the one after
    that.

    One of the ranks calls `prepare` on the memory before the others see it.
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
        self._own, self.spins = own, 0 if patient else SPINS

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
        own, missing, spins = self._semaphore[count % 2], len(self._others[0]), self.spins
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
