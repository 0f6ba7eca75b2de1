"""How a product is cut: packed blocks sized for the caches, and parts for the threads. The blocks' memory."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...rung import Array, empty
from .caches import caches

LEAST_WIDTH = 512  # columns; a is packed again for every block of b, which costs as much as ten columns
PARTS = 8  # per thread, so that a late thread leaves some to the others
LEAST_TILES = 4  # in a part: tiles one below the other share what they read of b


@dataclass(frozen=True, eq=False)  # there is one for each dtype, so `cut` finds them by identity
class Blocks:
    """The sizes of packed blocks for one dtype."""

    rows: int  # of a tile
    columns: int  # of a tile
    tiles: int  # tiles one below the other in a block of a: it fills half of a core's second cache
    width: int  # columns of a block of b: it fills a quarter of the last cache
    depth: int  # rows of a block of b, and columns of one of a, at most
    near: int  # elements that fit the second cache
    far: int  # elements that fit a third of the last cache
    memory: int  # elements that a thread needs for a block of a and a tile


@functools.cache
def blocks(kind: str) -> Blocks:
    """Return the block sizes for NumPy's dtype character ("f" or "d"): a dtype's name takes a microsecond."""
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
        near=caches().l2 // dtype.itemsize,
        far=caches().l3 // 3 // dtype.itemsize,
        memory=register_tile.ROWS * (columns + tiles * register_tile.PITCH),
    )


def parts(tiles: int, wide: int, threads: int, most: int) -> tuple[int, int]:
    """Return how many parts out is cut into: (one below the other, side by side).

    out is `tiles` tiles high and `wide` tiles wide; a part is at most `most` tiles high. Rows are cut first,
    because parts side by side each pack the same rows of a.
    """
    # One row of tiles or one column reads a matrix once, and fastest in few long pieces.
    pieces = 2 * threads if tiles == 1 or wide == 1 else PARTS * threads
    down = max(min(pieces, tiles // LEAST_TILES), -(-tiles // most), 1)
    if down > threads:  # the same number for each thread
        down = max(down - down % threads, -(-tiles // most))
    across = 1 if down >= threads else min(wide, -(-pieces // down))
    if down * across < threads:
        down = min(tiles, -(-threads // across))
    return down, across


@functools.lru_cache(1024)
def cut(m: int, n: int, k: int, size: Blocks, threads: int, packed: bool) -> tuple[int, int, int, int]:
    """Return how a product is cut for threads: (parts of b side by side, of out down, across, memory for b).

    The memory is in elements, for a packed b and a word of 8 bytes for each of its parts. Without packing
    both are 0, and out is cut at whole tiles: the last part takes the remaining columns.
    """
    wide = -(-n // size.columns) if packed else max(1, n // size.columns)
    down, across = parts(-(-m // size.rows), wide, threads, size.tiles)
    if not packed:
        return 0, down, across, 0
    packs = min(wide, PARTS * threads)
    words = packs * -(-k // size.depth)  # of two elements at most
    return packs, down, across, k * wide * size.columns + 2 * words


class KeptByThread(threading.local):
    """Each thread keeps its own objects here, by a key."""

    def __init__(self) -> None:
        self.found: dict[Any, Any] = {}


_kept = KeptByThread()


def memory(purpose: str, kind: str, elements: int) -> Array:
    """Return this thread's memory for a purpose, (1, elements) or longer, with the content of its last use.

    It is kept between calls. Fresh memory comes from the system page by page, and each page is cleared at its
    first use, which takes as long as packing a block into it. Pages that are never used take no memory.
    """
    found: Array | None = _kept.found.get((purpose, kind))
    if found is None or found.shape[1] < elements:
        found = _kept.found[purpose, kind] = empty(1, elements, kind)
    return found
