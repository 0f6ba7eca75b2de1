"""How large the packed blocks of a product are, by the sizes of the caches, and the memory they lie in."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass

import numpy as np

from ...rung import Array, empty
from .caches import caches

LEAST_WIDTH = 512  # columns: a is packed again for every block of b, at the price of about ten columns


@dataclass(frozen=True)
class Blocks:
    """The sizes of packed blocks for one dtype."""

    rows: int  # of a tile
    columns: int  # of a tile
    tiles: int  # tiles one below the other in a block of a: it fills half of a core's second cache
    width: int  # columns of a block of b: it fills a quarter of the last cache
    depth: int  # rows of a block of b, and columns of one of a, at most
    memory: int  # elements that a thread needs for a block of a, and for a tile


@functools.cache
def blocks(kind: str) -> Blocks:
    """Return the sizes for a dtype, given as NumPy's character ("f" or "d"): its name takes a microsecond."""
    from . import register_tile

    dtype = np.dtype(kind)
    deepest = register_tile.DEPTH * dtype.itemsize  # bytes
    columns = register_tile.tile_columns(dtype)
    tiles = max(1, caches().l2 // 2 // (register_tile.ROWS * deepest))
    width = max(LEAST_WIDTH, caches().l3 // 4 // deepest)
    return Blocks(
        rows=register_tile.ROWS,
        columns=columns,
        tiles=tiles,
        width=width - width % columns,
        depth=register_tile.DEPTH,
        memory=register_tile.ROWS * (columns + tiles * register_tile.PITCH),
    )


class _KeptMemory(threading.local):
    """Each thread has its own."""

    def __init__(self) -> None:
        self.memory: dict[tuple[str, str], Array] = {}


_kept = _KeptMemory()


def memory(purpose: str, kind: str, elements: int) -> Array:
    """Return this thread's memory for a purpose, (1, elements) or longer, with what it held when last used.

    It is kept from call to call: fresh memory comes from the system page by page, each cleared at its first
    use, which takes as long as packing a block into it. What is never used takes no room.
    """
    found = _kept.memory.get((purpose, kind))
    if found is None or found.shape[1] < elements:
        found = _kept.memory[purpose, kind] = empty(1, elements, kind)
    return found
