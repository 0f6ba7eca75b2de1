"""How rung 8 puts a product on a board, and the memory that a thread keeps for its products.

Rung 7 posts from compiled code, whose arrays are of one dtype. Here inputs and results may differ in theirs,
so Python writes their addresses.
"""

from __future__ import annotations

import functools
import threading

from ...rung import Array
from . import thread_pool
from .block_sizes import memory
from .caches import caches

# Behind the numbers that `board.post` writes: where the sums come as bf16 numbers, and the bytes from a row
# and from a column to the next.
ROUNDED = thread_pool.SEATS - thread_pool.NUMBERS + 7


class _OwnMemory(threading.local):
    """A thread's memory for a tile and a block of a, and its board for products that it computes alone."""

    def __init__(self) -> None:
        from . import bf16_product as unit

        rows: int = max(caches().l2 // 2 // (unit.PITCH * 4), 3 * unit.ROWS) + unit.ROWS
        self.space = memory("matrix unit", "f", rows * unit.PITCH + int(unit.OWN))
        self.board = memory("own board", "q", thread_pool.board.size)[0]
        self.board[:] = 0
        self.at = address_of(self.board)


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
