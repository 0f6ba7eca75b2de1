"""How rung 8 cuts a product and puts it on a board, and the memory that a thread keeps for its products.

Rung 7 posts from compiled code, whose arrays are of one dtype. Here inputs and results may differ in theirs,
so Python writes their addresses.
"""

from __future__ import annotations

import functools
import threading
from typing import NamedTuple

import numpy as np

from ...rung import Array
from . import block_sizes, thread_pool
from .block_sizes import memory
from .caches import caches

PACKS = 8  # pieces of b side by side, per thread

# Behind the numbers that `board.post` writes: where the sums come as bf16 numbers, and the bytes from a row
# and from a column to the next.
ROUNDED = thread_pool.SEATS - thread_pool.NUMBERS + 7


class Cut(NamedTuple):
    """How a product is cut."""

    depths: int  # blocks of the depth
    packs: int  # pieces of b, side by side in each depth
    pieces: int  # of b in all
    words: int  # of packed b
    down: int  # parts of out, one below the other
    across: int  # and side by side


@functools.lru_cache(1024)
def strip_width(k: int, parts: int, most: int) -> int:
    """Return the columns of a b of k rows whose parts, packed, fit so many bytes; a panel's at least."""
    from . import bf16_product as unit

    return max(1, most // (4 * _words(k, parts) * unit.COLUMNS)) * unit.COLUMNS


@functools.lru_cache(1024)
def cut(m: int, n: int, k: int, parts: int, threads: int) -> Cut:
    """Return how threads cut the product of (m, k) and (k, n), each number in so many parts."""
    from . import bf16_product as unit

    panels, depths = -(-n // unit.COLUMNS), unit.depths(k)
    packs = min(panels, PACKS * threads)
    high = max(1, caches().l2 // 2 // (unit.ROWS * unit.PITCH * 4 * parts))  # tiles in a block of a
    down, across = block_sizes.parts(-(-m // unit.ROWS), panels, threads, high)
    return Cut(depths, packs, packs * depths, _words(k, parts) * panels * unit.COLUMNS, down, across)


def _words(k: int, parts: int) -> int:
    """The words of packed b in a column."""
    from . import bf16_product as unit

    return -(-k // (2 * unit.GRAIN)) * unit.GRAIN * parts


class _OwnMemory(threading.local):
    """A thread's memory for a tile and a block of a, and its board for products that it computes alone."""

    def __init__(self) -> None:
        from . import bf16_product as unit

        rows: int = max(caches().l2 // 2 // (unit.PITCH * 4), 3 * unit.ROWS) + unit.ROWS
        self.space = memory("matrix unit", "f", rows * unit.PITCH + int(unit.OWN))
        self.board = memory("own board", "q", thread_pool.board.size)[0]
        self.board[:] = 0
        self.at = address_of(self.board)
        self._packed = self.space[0, :0]
        self._start = 0

    def packed_b(self, words: int, pieces: int) -> tuple[int, Array]:
        """Return where all threads pack b, and the marks behind it, all 0, for each piece and one more."""
        end = words + 2 * (pieces + 1)
        if len(self._packed) < end:  # to ask for its address takes a microsecond
            self._packed = memory("b of all threads, packed for the matrix unit", "f", end)[0]
            self._start = address_of(self._packed)
        marks = self._packed[words:end].view(np.int64)
        marks[:] = 0
        return self._start, marks


@functools.cache
def own_memory() -> _OwnMemory:
    """Return an object whose fields are each thread's own; it is made late, because it imports Numba."""
    return _OwnMemory()


def address_of(x: Array) -> int:
    """Return where an array begins."""
    return int(x.ctypes.data)


def post(board: Array, arrays: tuple[Array, Array, Array], more: tuple[int, ...]) -> None:
    """Write a product on the board as `board.post` does; each store is seen in order, as on every x86."""
    numbers: list[int] = []
    for x in arrays:
        numbers += (address_of(x), *x.shape, *x.strides)
    numbers += more
    board[thread_pool.NUMBERS : thread_pool.NUMBERS + len(numbers)] = numbers
    board[thread_pool.PACKED] = board[thread_pool.TAKEN] = 0
    board[thread_pool.OPEN] = board[thread_pool.BELL] + 1
    board[thread_pool.BELL] += 1
