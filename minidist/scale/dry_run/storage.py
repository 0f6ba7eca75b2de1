"""The memory of dry tensors: reserved addresses without memory, and byte ranges that hold no data."""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from functools import cache
from typing import Any

import torch
from torch import Tensor

RESERVED = 2**46
"""Bytes of addresses to reserve, at most; no address is used twice in a run."""


class Spans:
    """Ranges of bytes in order; ranges that touch are joined."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.alive: Any = None

    def add(self, start: int, stop: int) -> None:
        """Add a range."""
        low, high = bisect_left(self.stops, start), bisect_right(self.starts, stop)
        if low < high:
            start, stop = min(start, self.starts[low]), max(stop, self.stops[high - 1])
        self.starts[low:high], self.stops[low:high] = [start], [stop]

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether a range overlaps one of them."""
        index = bisect_right(self.stops, start)
        return index < len(self.starts) and self.starts[index] < stop

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of a range that none of them covers."""
        found, at = [], start
        for low, high in zip(self.starts, self.stops, strict=True):
            if low > at:
                found.append((at, min(low, stop)))
            at = max(at, high)
        return [(low, high) for low, high in [*found, (at, stop)] if low < min(high, stop)]


def extent(x: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the first byte after it."""
    start = int(x.storage_offset())
    last = start + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return start * x.element_size(), (last + 1) * x.element_size()


@cache
def reserve() -> mmap.mmap:
    """Reserve addresses. A page takes memory only once it is written to, and none ever is.

    Every dry run of a process starts from the first address again; earlier tensors hold no data either.
    """
    size, flags = RESERVED, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    while True:
        try:
            return mmap.mmap(-1, size, flags=flags)
        except (OSError, ValueError):
            if size <= 2**30:
                raise
            size //= 2


def address(room: mmap.mmap) -> int:
    """The first address of reserved memory."""
    return torch.frombuffer(room, dtype=torch.uint8, count=1).data_ptr()
