"""Products that are multiplied where they lie, without packing.

Packing copies each element of a and b once, which pays where the copy is read many times. Three kinds of
products are faster without it:

- small ones: the register tile reads a in place, and b from the second cache. If out is one tile high, b may
  come from the last cache;
- one or two rows times a matrix, and a matrix times a few columns. They use each element of the matrix once
  or twice, so memory's rate is the limit, and they read the matrix once, in the order in which it lies. So
  the order of a sum depends on it, too: only these products differ in their last bits with the strides.

The loops use pointers: for an array of any strides, the compiler does not know that rows are contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from . import register_tile
from .vector_moves import pointer, vector

FEW = 2  # rows; with more, the register tile is faster although it packs
GROUP = 4  # rows that a loop takes at a time

PACKED, IN_PLACE, FEW_ROWS, FEW_COLUMNS = range(4)
TRANSPOSED = 4  # added to a way: as the transposed product, out.T = b.T a.T


@njit(boundscheck=False)
def way(a: Any, b: Any, out: Any, near: int, far: int) -> int:
    """Return how to multiply a (m, k) by b (k, n): PACKED, or a way that `multiply` takes.

    Few rows and few columns need their matrix in the order in which they read it. A product is small if b,
    with what lies between its rows, spans at most `near` elements. If out is one tile high, each element of b
    is read once, and b may span `far`.
    """
    reach = far if a.shape[0] <= register_tile.ROWS else near
    if _few_rows_fit(a, b, out):
        return FEW_ROWS
    if _few_rows_fit(b.T, a.T, out.T):
        return FEW_ROWS + TRANSPOSED
    if _few_columns_fit(a, out):
        return FEW_COLUMNS
    if _few_columns_fit(b.T, out.T):
        return FEW_COLUMNS + TRANSPOSED
    if (
        out.shape[1] >= vector(out)
        and _in_rows(a)
        and _in_rows(b)
        and _in_rows(out)
        and b.shape[0] * abs(b.strides[0]) <= reach * out.itemsize
    ):
        return IN_PLACE
    return PACKED


@njit(boundscheck=False, inline="always")
def multiply(a: Any, b: Any, out: Any, how: int) -> None:
    """out (m, n) = a (m, k) b (k, n), in the way found for it, or for a product of which this is a part.

    A part has any number of rows, and all columns or at least a tile's.
    """
    if how >= TRANSPOSED:
        a, b, out, how = b.T, a.T, out.T, how - TRANSPOSED
    if how == FEW_ROWS:
        _few_rows(a, b, out)
    elif how == FEW_COLUMNS:
        _few_columns(a, b, out)
    else:
        _in_place(a, b, out)


def in_columns(a: Any, b: Any, how: int) -> tuple[Any, Any]:
    """Return a and b with few columns one after the other, so that no thread has to copy them for itself."""
    if how == FEW_COLUMNS:
        return a, np.asfortranarray(b)
    return (np.ascontiguousarray(a) if how == FEW_COLUMNS + TRANSPOSED else a), b


@njit(boundscheck=False, inline="always")
def _in_rows(x: Any) -> Any:
    return x.strides[1] == x.itemsize


@njit(boundscheck=False, inline="always")
def _few_rows_fit(a: Any, b: Any, out: Any) -> Any:
    return a.shape[0] <= FEW and _in_rows(b) and _in_rows(out)


@njit(boundscheck=False, inline="always")
def _few_columns_fit(a: Any, out: Any) -> Any:
    return out.shape[1] <= vector(out) // 2 and _in_rows(a)


@njit(boundscheck=False, inline="always")
def _in_place(a: Any, b: Any, out: Any) -> None:
    """Multiply with the register tile. All three have contiguous rows, and n is one vector or more.

    The last panel starts back from the edge, half a vector, one or two wide: it computes some columns twice.
    Sums are cut into the same depths as those of packed blocks, so the result has the same bits.
    """
    m, k = a.shape
    n = b.shape[1]
    length, columns = vector(out), register_tile.columns(out)
    a_pitch, b_pitch = a.strides[0] // a.itemsize, b.strides[0] // b.itemsize
    c_pitch = out.strides[0] // out.itemsize
    tiles, depths = -(-m // register_tile.ROWS), -(-k // register_tile.DEPTH)
    for t in range(tiles):
        i = t * m // tiles
        rows = (t + 1) * m // tiles - i
        done = 0
        while done < n:
            width = columns if n - done > length and n >= columns else length
            if n - done <= length // 2:
                width = length // 2
            j = min(done, n - width)
            c = pointer(out, i, j)
            for d in range(depths):
                p, end = d * k // depths, (d + 1) * k // depths
                a_rows, panel = pointer(a, i, p), pointer(b, p, j)
                register_tile.multiply((rows, width, end - p), a_rows, a_pitch, panel, b_pitch, c, c_pitch, d)
            done += width


@njit(boundscheck=False, fastmath={"contract"})
def _few_rows(a: Any, b: Any, out: Any) -> None:
    """Add four rows of b at a time to the few rows of out. b and out have contiguous rows."""
    m, k = a.shape
    n = b.shape[1]
    for i in range(m):
        row = pointer(out, i, 0)
        for j in range(n):
            row[j] = 0
    for p in range(0, k - 3, 4):
        b0, b1, b2, b3 = pointer(b, p, 0), pointer(b, p + 1, 0), pointer(b, p + 2, 0), pointer(b, p + 3, 0)
        for i in range(m):
            a0, a1, a2, a3 = a[i, p], a[i, p + 1], a[i, p + 2], a[i, p + 3]
            row = pointer(out, i, 0)
            for j in range(n):
                row[j] += a0 * b0[j] + a1 * b1[j] + a2 * b2[j] + a3 * b3[j]
    for p in range(k - k % 4, k):
        b0 = pointer(b, p, 0)
        for i in range(m):
            row, a0 = pointer(out, i, 0), a[i, p]
            for j in range(n):
                row[j] += a0 * b0[j]


@njit(boundscheck=False, fastmath={"reassoc", "contract"})
def _few_columns(a: Any, b: Any, out: Any) -> None:
    """Take four rows of a at a time, and all columns of b. a has contiguous rows.

    The last group starts back from the edge, or takes a row twice, so each sum has the same order wherever
    its row lies. Vectors of partial sums need the compiler's leave to add in another order ("reassoc").
    """
    m, k = a.shape
    n = b.shape[1]
    in_columns = b.strides[0] == b.itemsize
    copy = np.empty((0 if in_columns else n, k), out.dtype)
    for j in range(len(copy)):
        for p in range(k):
            copy[j, p] = b[p, j]
    for step in range(0, m, GROUP):
        i = max(0, min(step, m - GROUP))
        i1, i2, i3 = min(i + 1, m - 1), min(i + 2, m - 1), min(i + 3, m - 1)
        a0, a1, a2, a3 = pointer(a, i, 0), pointer(a, i1, 0), pointer(a, i2, 0), pointer(a, i3, 0)
        for j in range(n):
            column = pointer(b, 0, j) if in_columns else pointer(copy, j, 0)
            s0 = s1 = s2 = s3 = a.dtype.type(0)
            for p in range(k):
                s0 += a0[p] * column[p]
                s1 += a1[p] * column[p]
                s2 += a2[p] * column[p]
                s3 += a3[p] * column[p]
            out[i, j], out[i1, j], out[i2, j], out[i3, j] = s0, s1, s2, s3
