"""How much of attention is done at a time, and the memory that a thread needs for it, in elements."""

from __future__ import annotations

from ...support.vector_unit import vector_unit

TILES = 18  # of queries in a part, at most: they share one packing of the keys
GAP = 16  # elements between rows of scores; no power of two, so rows fall into different sets of a cache
KEYS, GROUP = 256, 2  # forward: keys in a block, and tiles of queries that make their scores together
QUERIES, TALL = 256, 4  # backward: queries in a block, and tiles of keys that make their scores together


def padded(width: int) -> int:
    """Return the columns of the panels that hold `width`."""
    columns = 2 * vector_unit().lanes("float32")
    return -(-width // columns) * columns


def most_queries() -> int:
    """Return the most queries of a part."""
    return TILES * vector_unit().tile_rows


def forward_memory(width: int) -> int:
    """Return the elements for packed keys and values, scores, and a part's sums."""
    scores = GROUP * vector_unit().tile_rows * (KEYS + GAP)
    return KEYS * (width + padded(width)) + scores + most_queries() * (padded(width) + 2)


def backward_memory(width: int) -> int:
    """Return the elements for packed queries and gradients, weights, keys, and sums for dq."""
    row, height = QUERIES + GAP, TALL * vector_unit().tile_rows
    return 2 * QUERIES * (width + padded(width)) + 2 * height * row + width * (height + GAP + row) + 2 * row
