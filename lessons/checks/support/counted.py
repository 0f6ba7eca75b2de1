"""Matrices and lists that count: each read and write of an element, and the cache lines that a cache fetches.

    cache = Cache(lines=24)
    a = Counted(numpy_matrix, cache)
    a[2, 3]                      # one read; the line that it lies in is fetched, if it is not there
    a.reads, a.writes, cache.fetched

The cache forgets the line that was not used for the longest time (LRU). A line is 64 bytes: 16 float32.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np

from checks.support.verdicts import wrong

LINE = 16
"""Elements of float32 in a cache line."""


class Seen(list):
    """A list that counts how often its elements are read."""

    reads = 0

    def __iter__(self) -> Iterator[Any]:
        for value in super().__iter__():
            self.reads += 1
            yield value

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.reads += len(found) if isinstance(place, slice) else 1
        return found

    def __deepcopy__(self, memo: Any) -> Seen:
        return self


class Cache:
    """A cache of so many lines, shared by all matrices that are given it."""

    def __init__(self, lines: int, line: int = LINE) -> None:
        self.lines, self.line = lines, line
        self.held: OrderedDict[int, None] = OrderedDict()
        self.fetched = 0
        self._next = 0

    def place(self, elements: int) -> int:
        """Where a new matrix begins, in elements: at a line's start."""
        start = self._next
        self._next += -(-elements // self.line) * self.line + self.line
        return start

    def touch(self, element: int) -> None:
        """Use an element: fetch its line unless it is held."""
        line = element // self.line
        if line in self.held:
            self.held.move_to_end(line)
            return
        self.fetched += 1
        self.held[line] = None
        if len(self.held) > self.lines:
            self.held.popitem(last=False)


class Counted:
    """A matrix whose elements are read and written one at a time, and counted."""

    def __init__(self, values: np.ndarray, cache: Cache | None = None) -> None:
        self.values, self.cache = values, cache
        self.shape, self.dtype, self.ndim = values.shape, values.dtype, values.ndim
        self.reads = self.writes = self.along = 0  # along: reads of the element beside the last one read
        self._last: Any = None
        self.start = cache.place(values.size) if cache is not None else 0

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if not self._is_element(index):
            wrong(
                "Here each read is counted, so read one element at a time, as in a[i, p]: "
                f"no rows, slices or NumPy functions (it asked for [{_shown(index)}])."
            )
        value = self.values[index]
        self.reads += 1
        self.along += self._last == (index[0], index[1] - 1)
        self._last = index
        self._touch(*index)
        return value

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[index] = value
        if self._is_element(index):
            self.writes += 1
            self._touch(*index)
            return
        for i, j in np.argwhere(_mask(self.shape, index)).tolist():
            self.writes += 1
            self._touch(i, j)

    def _whole(self, *other: Any, **more: Any) -> Any:
        """What Python and NumPy call for operations on whole matrices."""
        wrong(
            "a @ b and NumPy's functions do the whole product in one call, and that product is the exercise: "
            "write the loops, with one a[i, p] * b[p, j] at a time."
        )

    __matmul__ = __rmatmul__ = __mul__ = __rmul__ = __add__ = __radd__ = __array__ = _whole
    __array_ufunc__ = __array_function__ = _whole

    def _is_element(self, index: Any) -> bool:
        return (
            isinstance(index, tuple)
            and len(index) == 2
            and all(isinstance(each, (int, np.integer)) for each in index)
        )

    def _touch(self, i: int, j: int) -> None:
        if self.cache is not None:
            self.cache.touch(self.start + (i % self.shape[0]) * self.shape[1] + j % self.shape[1])


def _mask(shape: tuple[int, ...], index: Any) -> np.ndarray:
    mask = np.zeros(shape, bool)
    mask[index] = True
    return mask


def _shown(index: Any) -> str:
    parts = index if isinstance(index, tuple) else (index,)
    return ", ".join(
        ":" if isinstance(each, slice) else "..." if each is ... else str(each) for each in parts
    )
