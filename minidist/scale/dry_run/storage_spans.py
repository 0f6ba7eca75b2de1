"""Which bytes of a storage hold no data: ranges, joined where they touch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

from torch import Tensor


class Spans:
    """Ranges of bytes, joined where they touch, in order."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.alive: Any = None

    def add(self, start: int, stop: int) -> None:
        """Take in a range."""
        low, high = bisect_left(self.stops, start), bisect_right(self.starts, stop)
        if low < high:
            start, stop = min(start, self.starts[low]), max(stop, self.stops[high - 1])
        self.starts[low:high], self.stops[low:high] = [start], [stop]

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether a range has something of them."""
        place = bisect_right(self.stops, start)
        return place < len(self.starts) and self.starts[place] < stop

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What of a range lies in none of them."""
        found, at = [], start
        for low, high in zip(self.starts, self.stops, strict=True):
            if low > at:
                found.append((at, min(low, stop)))
            at = max(at, high)
        return [(low, high) for low, high in [*found, (at, stop)] if low < min(high, stop)]


def extent(x: Tensor) -> tuple[int, int]:
    """First byte in its storage, and the first behind it."""
    start = int(x.storage_offset())
    last = start + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return start * x.element_size(), (last + 1) * x.element_size()
