"""Measure one core's and all cores' peaks: multiply-adds in registers, and a STREAM triad.

Multiply-adds are fused ones of the vector unit in float32 and float64, and products of bf16 numbers by the
matrix unit, where `bf16_instructions.py` finds one.

A peak is a maximum, so each figure is the best of a few short repetitions: a neighbour's burst of work, or a
clock that has yet to rise, then costs one repetition and not the figure. For all cores, one thread a core
runs the same loop, all started together; the rate is their total work over the time from first start to last
end. The matrix units of Apple's CPUs are left out; its library may exceed the peak. On a virtual machine,
bandwidth may change with what the host does: two cores of an AMD EPYC (Zen 4), idle otherwise, had 82 GB/s,
and 43 within the next 20 seconds.

Sources: Williams, Waterman, Patterson, CACM 52(4), 2009 (which peaks make a roofline); McCalpin, STREAM, 1995
(the triad, its 24 bytes an element, arrays of four times the last caches).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

from ..cpu.support.bf16_instructions import AMX, matrix_unit
from ..cpu.support.caches import available_cpus, caches
from ..rung import Array, empty, require_numba
from .peaks import Roof

TimedLoop = Callable[[], float]  # does a share of work without the GIL, and returns how much: FLOP or bytes

TURNS = 200_000  # of the FMA loop in one call: a millisecond, so the call from Python costs nothing
QUEUE = 16  # threads that may make such calls; more of them make longer calls, or wait for the GIL
CHUNK = 2**18  # elements of each array that one call of the triad goes over: 6 MiB in all
UNKNOWN_CACHE = 64 * 2**20  # bytes assumed for the last cache if the system reports none
VECTOR_KINDS = ("float32", "float64")
LARGEST = 2**30  # bytes of a thread's part of an array, which bounds the time to allocate its pages


@dataclass(frozen=True)
class Rate:
    """The work that threads did together, and how much of the time they were allowed to run."""

    per_second: float
    granted: float  # share of the measured time in which the threads ran


def roofs(seconds: float = 0.04, repetitions: int = 8, memory: int | None = None) -> tuple[Roof, Roof]:
    """Measure and return the roof of one core and that of all cores.

    Each of `repetitions` takes `seconds`, for each dtype and each kind of store, on one core and on all:
    eight times their product. Each of the triad's arrays takes four times the last caches, if `memory` bytes
    (by default a quarter of what is free) have room for all three. If they are smaller than the caches, it
    measures the bandwidth of the caches.
    """
    require_numba()
    memory = available_memory() // 4 if memory is None else memory
    cache, cores = caches(), len(available_cpus())
    kinds = (*VECTOR_KINDS, "bfloat16") if matrix_unit() else VECTOR_KINDS
    one = _roof("one core", 1, cache.l3, seconds, repetitions, memory, kinds)
    if cores == 1:
        return one, one
    together = _roof(f"{cores} cores", cores, cache.l3_total, seconds, repetitions, memory, kinds)
    # All cores include the case of one: if memory is slower for many, or others work, that is the maximum.
    flops = {dtype: max(rate, one.flops[dtype]) for dtype, rate in together.flops.items()}
    bandwidth = max(together.bandwidth, one.bandwidth)
    return one, replace(together, flops=flops, bandwidth=bandwidth)


def _roof(
    name: str,
    threads: int,
    cache: int,
    seconds: float,
    repetitions: int,
    memory: int,
    kinds: tuple[str, ...] = VECTOR_KINDS,
) -> Roof:
    def best(works: Sequence[TimedLoop]) -> Rate:
        return max((rate(works, seconds) for _ in range(repetitions)), key=lambda run: run.per_second)

    turns = TURNS * -(-threads // QUEUE)
    fma = {dtype: best([_fma_work(dtype, turns) for _ in range(threads)]) for dtype in kinds}
    size = min(4 * (cache or UNKNOWN_CACHE), LARGEST * threads, memory // 3)
    # Whole chunks, so that each starts on a cache line and fills its last; no more threads than chunks.
    chunks = max(1, size // 8 // CHUNK)
    shares = [_Share(max(1, chunks // threads)) for _ in range(min(threads, chunks))]
    # Which kind of store is faster differs between CPUs; a peak is the better.
    triads = [best([share.work(streaming) for share in shares]) for streaming in (True, False)]
    return Roof(
        name,
        {dtype: run.per_second for dtype, run in fma.items()},
        max(run.per_second for run in triads),
        granted=min(run.granted for run in (*fma.values(), *triads)),
    )


def rate(works: Sequence[TimedLoop], seconds: float) -> Rate:
    """Call each of `works` in a thread for `seconds`, after an untimed call, and count what they did."""
    cpus = available_cpus()
    together = threading.Barrier(len(works))

    def pin(i: int) -> None:
        # A single thread goes where the system likes, which on some machines is a faster core.
        if len(works) > 1 and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, {cpus[i % len(cpus)]})  # 0 is the calling thread

    def warm(i: int) -> None:
        pin(i)
        works[i]()

    def timed(i: int) -> tuple[float, float, float, float]:
        pin(i)
        together.wait(timeout=30)
        ran = time.thread_time()
        start = end = time.perf_counter()
        done = 0.0
        while end < start + seconds:
            done += works[i]()
            end = time.perf_counter()
        return start, end, time.thread_time() - ran, done

    with ThreadPoolExecutor(len(works)) as pool:
        list(pool.map(warm, range(len(works))))
        starts, ends, ran, done = zip(*pool.map(timed, range(len(works))), strict=True)
    asked = sum(ends) - sum(starts)
    return Rate(sum(done) / (max(ends) - min(starts)), min(1.0, sum(ran) / asked))


def _fma_work(dtype: str, turns: int) -> TimedLoop:
    from . import peak_loops  # imports Numba, so only when there is something to compile

    if dtype == "bfloat16" and matrix_unit() == AMX:
        fewer = turns // 8  # a turn takes 64 cycles, not some 12

        def multiply_tiles() -> float:
            peak_loops.tiles()(fewer)
            return float(fewer * peak_loops.TILE_FLOPS)

        return multiply_tiles
    stored = "uint32" if dtype == "bfloat16" else dtype
    registers = peak_loops.registers(stored)
    flops = float(turns * peak_loops.flops_per_turn(stored))

    def work() -> float:
        peak_loops.fma(registers, turns)
        return flops

    return work


class _Share:
    """A thread's own part of a, b and c, of which each call processes the next chunk.

    The thread allocates it at its first call, because a page lies next to the core that first writes to it.
    """

    def __init__(self, chunks: int) -> None:
        self.size = chunks
        self.chunks: Iterator[tuple[Array, ...]] | None = None

    def work(self, streaming: bool) -> TimedLoop:
        from . import peak_loops

        triad = peak_loops.triad(streaming)

        def work() -> float:
            if self.chunks is None:
                self.chunks = cycle(self._chunks())
            a, b, c = next(self.chunks)
            triad(a, b, c, 3.0)
            return 24.0 * CHUNK  # two elements read, one written; what the hardware adds is not counted

        return work

    def _chunks(self) -> list[tuple[Array, ...]]:
        a, b, c = (empty(self.size, CHUNK, "float64") for _ in range(3))
        for array, value in ((a, 0.0), (b, 1.0), (c, 2.0)):
            array.fill(value)
        return list(zip(a, b, c, strict=True))


def available_memory(meminfo: str = "/proc/meminfo", cgroup: str = "/sys/fs/cgroup") -> int:
    """Return the bytes of free memory, within a container's limit; 1 GiB if nothing reports it."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path(meminfo).read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for names in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
    ):
        with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit ("max")
            limit, used = (int((Path(cgroup) / name).read_text()) for name in names)
            found += [max(0, limit - used)]
    if not found:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            # macOS says how much there is, not how much is free.
            found += [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]
    return min(found, default=2**30)
