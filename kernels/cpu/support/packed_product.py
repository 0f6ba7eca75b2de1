"""Packing, and the product of packed blocks: the loops around the register tile.

Packing copies a block into the order in which the tile reads it. The block is then read many times, and what
the tile needs next lies in the same cache lines and pages as what it has, where the processor fetches ahead
by itself. Packing reads the source in place, whatever its strides, so a transposed view costs no extra copy.

Source: Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, ACM TOMS 2008, section 4.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from . import register_tile
from .vector_moves import move, offset, pointer, transpose, vector

STRIP = 8  # rows that are packed at a time over all panels


@njit(boundscheck=False)
def pack(x: Any, to: Any, pitch: int) -> None:
    """Copy x (rows, columns), an array of any strides, so that to[r * pitch + c] = x[r, c].

    If one of the strides is one element, whole vectors are moved. The last vector of a row starts back from
    the row's end: it writes some elements twice, and none outside.
    """
    rows, columns = x.shape
    length = vector(x)
    if x.strides[1] == x.itemsize and columns >= length:
        for r in range(rows):
            source, target = pointer(x, r, 0), offset(to, r * pitch)
            for step in range(0, columns, length):
                c = min(step, columns - length)
                move(offset(target, c), offset(source, c))
    elif x.strides[0] == x.itemsize and columns >= length and rows >= length:
        stride = x.strides[1] // x.itemsize
        for r_step in range(0, rows, length):
            r = min(r_step, rows - length)
            for c_step in range(0, columns, length):
                c = min(c_step, columns - length)
                transpose(offset(to, r * pitch + c), pitch, pointer(x, r, c), stride)
    else:
        for r in range(rows):
            for c in range(columns):
                to[r * pitch + c] = x[r, c]


@njit(boundscheck=False)
def put(tile: Any, pitch: int, out: Any, add: int) -> None:
    """Unpack: out[r, c] = tile[r * pitch + c], or += with `add`, for an out of any strides."""
    rows, columns = out.shape
    for r in range(rows):
        for c in range(columns):
            out[r, c] = out[r, c] + tile[r * pitch + c] if add else tile[r * pitch + c]


@njit(boundscheck=False)
def pack_panels(b: Any, to: Any) -> None:
    """Copy b (depth, n) as panels, one after another: a tile's columns row by row, then the next columns.

    The last panel is as wide as the others, filled up with zeros.
    """
    depth, n = b.shape
    columns = register_tile.columns(b)
    # If b is in C order, copy a strip of rows over all panels at a time. A whole panel at a time would step
    # from page to page, at half the rate.
    strip = STRIP if b.strides[1] == b.itemsize else depth
    for p0 in range(0, depth, strip):
        p1 = min(p0 + strip, depth)
        for j in range(0, n, columns):
            panel = offset(to, j * depth + p0 * columns)
            pack(b[p0:p1, j : j + columns], panel, columns)
            # Zeros only beyond b: in rung 7 another thread may already read this part while it is packed
            # again.
            for p in range(p1 - p0):
                for c in range(n - j, columns):
                    panel[p * columns + c] = 0


@njit(boundscheck=False, inline="always")
def multiply(a: Any, packed_b: Any, out: Any, memory: Any, tiles: int, add: int) -> None:
    """out (m, n) = a (m, depth) b (depth, n), or += with `add`, for a b packed by `pack_panels`.

    `tiles` tiles lie one below the other, of equal height to within a row, since a low tile has the same
    overhead as a high one. `memory` has room for the packed a and one tile.
    """
    m, depth = a.shape
    n = out.shape[1]
    columns = register_tile.columns(out)
    packed_a = offset(memory, register_tile.ROWS * columns)
    in_rows = out.strides[1] == out.itemsize
    stride = out.strides[0] // out.itemsize
    pitch = register_tile.PITCH
    pack(a, packed_a, pitch)
    for j in range(0, n, columns):
        panel = offset(packed_b, j * depth)
        width = min(columns, n - j)
        for t in range(tiles):
            i = t * m // tiles
            rows = (t + 1) * m // tiles - i
            a_rows = offset(packed_a, i * pitch)
            # If a vector would cross the edge, or out's rows are not contiguous, go through a tile in memory.
            # One call for both: Numba compiles the tile again for each call with other types, such as a 0.
            direct = in_rows and width == columns
            c = pointer(out, i, j) if direct else memory
            c_pitch, added = (stride, add) if direct else (columns, 0)
            register_tile.multiply((rows, width, depth), a_rows, pitch, panel, columns, c, c_pitch, added)
            if not direct:
                put(memory, columns, out[i : i + rows, j : j + width], add)


@njit(boundscheck=False, inline="always")
def multiply_in_blocks(a: Any, b: Any, out: Any, space: Any, height: int, width: int) -> None:
    """out (m, n) = a (m, k) b (k, n) in one thread: a block of b after the other, and of a for each of them.

    A block of a is `height` tiles high, one of b `width` columns wide. `space` is memory for one of each and
    a tile.
    """
    m, k = a.shape
    n = b.shape[1]
    own = pointer(space, 0, 0)
    packed_b = offset(own, register_tile.ROWS * (register_tile.columns(out) + height * register_tile.PITCH))
    tiles = -(-m // register_tile.ROWS)
    depths = -(-k // register_tile.DEPTH)
    for j0 in range(0, n, width):
        j1 = min(j0 + width, n)
        for d in range(depths):
            p0, p1 = d * k // depths, (d + 1) * k // depths  # equal parts, with no short rest
            pack_panels(b[p0:p1, j0:j1], packed_b)
            for t0 in range(0, tiles, height):
                t1 = min(t0 + height, tiles)
                i0, i1 = t0 * m // tiles, t1 * m // tiles
                multiply(a[i0:i1, p0:p1], packed_b, out[i0:i1, j0:j1], own, t1 - t0, d)
