"""Attention by blocks of keys, with both products in the register tile of the matmul ladder.

Some queries go through the keys, KEYS at a time. Keys and values of a block are packed as the tile reads
them: the keys transposed, since scores are q k^T. A group of queries, two tiles high, makes its scores, their
softmax, and adds weights times values to its sums; meanwhile scores and block stay in the first two caches.
No array has more scores than those.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from ...support import register_tile
from ...support.packed_product import pack_panels
from ...support.vector_moves import offset, pointer, vector
from .sizes import GAP, GROUP, KEYS
from .vector_softmax import LN_2, LOG2_E, largest, powers, scaled

ROW = KEYS + GAP  # from a row of scores to the next
COLUMNS = register_tile.tile_columns("float32")
INFINITY = np.float32(np.inf)


@njit(boundscheck=False)
def place(part: int, heads: int, parts: int, queries: int, keys: int) -> tuple[slice, slice, int, slice]:
    """Return a part's rows of the queries, those of its head's keys, its first query, and its rows of sums.

    There are `parts` for each head, and sums for each part. The last queries come first: if the mask is
    skipped, they have the most keys. Sizes are those of all heads.
    """
    queries, keys = queries // heads, keys // heads
    head, s = part % heads, parts - 1 - part // heads
    first, last = s * queries // parts, (s + 1) * queries // parts
    sums = s * heads + head
    own, seen = slice(head * queries + first, head * queries + last), slice(head * keys, (head + 1) * keys)
    return own, seen, first, slice(sums * keys, (sums + 1) * keys)


@njit(boundscheck=False)
def product(
    shape: Any, a: Any, a_pitch: int, b: Any, b_step: int, b_pitch: int, c: Any, c_pitch: int, add: int
) -> None:
    """c = a b, or += with `add`; shape is (rows, columns, depth), and c has room for whole vectors.

    Column j of b begins at b[j * b_step], and its rows are b_pitch apart: (depth, COLUMNS) where b lies in
    panels of this depth, (1, pitch) where it lies in rows. c's rows are cut into tiles of equal height.
    """
    rows, columns, depth = shape
    tiles = -(-rows // register_tile.ROWS)
    for j in range(0, columns, COLUMNS):
        panel, across = offset(b, j * b_step), min(COLUMNS, columns - j)
        for t in range(tiles):
            i = t * rows // tiles
            tile = (t + 1) * rows // tiles - i, across, depth
            a_rows, to = offset(a, i * a_pitch), offset(c, i * c_pitch + j)
            register_tile.multiply(tile, a_rows, a_pitch, panel, b_pitch, to, c_pitch, add)


@njit(boundscheck=False)
def weigh(
    row: Any, count: int, seen: int, scale: float, top: float, total: float, sums: Any, width: int
) -> tuple[float, float]:
    """Make weights of the first `count` of a row's `seen` scores, and zeros of the others.

    A step of the online softmax, in base 2: `top` and `total` are the largest score of the blocks before,
    times `scale`, and the sum of weights. Both are returned with this block's, and if the largest has grown,
    `sums` is made smaller.
    """
    whole = -(-count // vector(row)) * vector(row)
    for j in range(count, whole):
        row[j] = -INFINITY
    higher = max(top, largest(row, count) * scale)
    if higher > top:
        shrink = np.float32(math.exp((top - higher) * np.float32(LN_2)))
        scaled(sums, width, shrink)
        total *= shrink
    total += powers(row, count, scale, higher)
    for j in range(whole, seen):
        row[j] = 0
    return higher, total


@njit(boundscheck=False, error_model="numpy")
def attend(
    q: Any, k: Any, v: Any, out: Any, logs: Any, space: Any, first: int, causal: int, skip: int
) -> None:
    """Fill out (queries, width) and logs (queries, 1) for some queries; the first of them has number `first`.

    k and v are those of the whole head. With `causal` a query sees the keys up to its own number. The weights
    of others are zeros, and with `skip` what no query of a group sees is left out.
    """
    queries, width = q.shape
    wide, group = -(-width // COLUMNS) * COLUMNS, GROUP * register_tile.ROWS
    scale = np.float32(LOG2_E / math.sqrt(width))
    packed_k = pointer(space, 0, 0)
    packed_v = offset(packed_k, KEYS * width)
    scores = offset(packed_v, KEYS * wide)
    sums = offset(scores, group * ROW)
    tops = offset(sums, queries * wide)
    totals = offset(tops, queries)
    for i in range(queries):
        tops[i], totals[i] = np.float32(-1e38), 0  # finite, so that a first score of -inf weighs 0
    for e in range(queries * wide):
        sums[e] = 0
    keys = min(k.shape[0], first + queries) if causal and skip else k.shape[0]
    for j0 in range(0, keys, KEYS):
        height = min(KEYS, keys - j0)
        pack_panels(k[j0 : j0 + height].T, packed_k)
        pack_panels(v[j0 : j0 + height], packed_v)
        for i0 in range(0, queries, group):
            rows = min(group, queries - i0)
            seen = min(height, first + i0 + rows - j0) if causal and skip else height
            if seen <= 0:
                continue
            shape = rows, seen, width
            product(shape, pointer(q, i0, 0), width, packed_k, width, COLUMNS, scores, ROW, 0)
            for r in range(rows):
                i, row = i0 + r, offset(scores, r * ROW)
                count = max(0, min(seen, first + i + 1 - j0)) if causal else seen
                own = offset(sums, i * wide)
                tops[i], totals[i] = weigh(row, count, seen, scale, tops[i], totals[i], own, wide)
            shape = rows, width, seen
            product(shape, scores, ROW, packed_v, height, COLUMNS, offset(sums, i0 * wide), wide, 1)
    for i in range(queries):
        for c in range(width):
            out[i, c] = sums[i * wide + c] / totals[i]
        logs[i, 0] = tops[i] * np.float32(LN_2) + math.log(totals[i])
