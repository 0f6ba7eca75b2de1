"""Products of bf16 numbers, and of float32 numbers cut into bf16 parts: the loops around rung 8's tile.

With two parts of each number a product takes three products of parts, a1 b1 + a1 b2 + a2 b1; with three it
takes six. The least are added up first. What is left out is some 2**-16 of a product, and 2**-24.

To the tile a packed row of a and a packed panel of b look as rung 6's do, with half as many steps: each
multiplies a pair (`bf16_packing.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from . import atomic, bf16_packing, board, packed_product, register_tile
from .bf16_instructions import AMX, matrix_unit

COLUMNS = 32  # of a tile of out: two vectors, or two tiles side by side
# Words of a row of packed a at most, and from a row to the next: not a power of two, as in rung 6. Pairs
# halve the steps, so a row may be longer than there: 2048 numbers are one block of the depth, and out is not
# read again.
DEPTH, PITCH = 1024, 1040
STRIP = 16  # pairs of rows of b that are packed at a time over several panels
# GRAIN is what the words of a row are a multiple of, ROWS those of a tile, and AT_ONCE the bytes of packed b
# that are used before the next ones. With vectors that is one panel, which stays in the first cache while
# all tiles of a pass by. AMX's is too large for that cache, and out would be written to other pages with each
# tile; so b's panels pass by a tile of a, as many as fit half of the second cache.
if matrix_unit() == AMX:
    from . import tile_registers
    from .tile_registers import add_products, begin_tiles, end_tiles

    GRAIN, ROWS, AT_ONCE = tile_registers.SIDE, tile_registers.ROWS, 2**20
else:
    GRAIN, ROWS, AT_ONCE = 1, register_tile.ROWS, 0

    @njit
    def begin_tiles() -> None:
        """Vectors need no preparation."""

    end_tiles = begin_tiles

    @njit(boundscheck=False, inline="always")
    def add_products(
        shape: Any, parts: int, a: int, a_part: int, b: int, b_part: int, c: int, c_pitch: int, add: int
    ) -> None:
        """The same as that of `tile_registers`, with vectors: a tile of out at a time, of `shape[0]` rows.

        The third of `shape` is the words from a row of a to the next.
        """
        out = board.elements(c, np.float32)
        for level in range(parts - 1, -1, -1):
            for x in range(level + 1):
                a_x = board.elements(a + 4 * x * a_part, np.uint32)
                b_y = board.elements(b + 4 * (level - x) * b_part, np.uint32)
                whole = shape[0], COLUMNS, shape[1]
                register_tile.multiply(whole, a_x, shape[2], b_y, COLUMNS, out, c_pitch, add)
                add = 1


# Words of a thread's memory for one tile, or for squares to turn over, before its packed rows of a.
OWN = max(ROWS * COLUMNS, 3 * bf16_packing.SQUARE)


@njit(boundscheck=False)
def height(m: int) -> int:
    """Return over how many rows the tiles of m rows are spread: AMX's are whole, all but the last."""
    return m if GRAIN == 1 else -(-m // ROWS) * ROWS


@njit(boundscheck=False)
def depths(k: int) -> int:
    """Return the number of blocks into which the depth of k numbers is cut."""
    return -(-(-(-k // (2 * GRAIN)) * GRAIN) // DEPTH)


@njit(boundscheck=False)
def depth_block(d: int, k: int) -> tuple[int, int]:
    """Return where block d of the depth begins and ends, in pairs, for k rows of b."""
    grains, blocks = -(-k // (2 * GRAIN)), depths(k)
    return d * grains // blocks * GRAIN, (d + 1) * grains // blocks * GRAIN


@njit(boundscheck=False, inline="always")
def pack_together(b: Any, to: int, at: int, packs: int, parts: int, own: int) -> None:
    """Pack b with the other threads of a board, as `shared_packing.pack_together` does.

    A piece is one of the `packs` side by side in each of b's depths. What another thread has taken and not
    marked as packed is packed again. If b is in C order, a strip of rows is packed over all panels at a time:
    a whole panel at a time would step from page to page, which takes twice as long.
    """
    address, k, n, down, right, size = b
    flags, panels = board.number(at, board.FLAGS), -(-n // COLUMNS)
    pieces, mine, piece = packs * depths(k), True, board.take_to_pack(at)
    while mine or piece < pieces:
        if piece >= pieces:
            mine, piece = False, 0
        if mine or not atomic.read(flags + 8 * piece):
            d, s = divmod(piece, packs)
            p0, p1 = depth_block(d, k)
            depth = p1 - p0
            strip = STRIP if right == size else depth
            for q in range(p0, p1, strip):
                end = min(q + strip, p1)
                for panel in range(s * panels // packs, (s + 1) * panels // packs):
                    j = panel * COLUMNS
                    turned = min(COLUMNS, n - j), min(k, 2 * end) - 2 * q, right, down, size
                    target = to + 4 * COLUMNS * (p0 * parts * panels + panel * depth + q - p0)
                    step = 4 * COLUMNS * depth * panels
                    x = (address + 2 * q * down + j * right, *turned)
                    bf16_packing.pack(x, target, 1, COLUMNS, parts, step, end - q, own)
        if mine:
            atomic.store(flags + 8 * piece, 1)
        piece = board.take_to_pack(at) if mine else piece + 1


@njit(boundscheck=False, inline="always")
def multiply(
    a: Any,
    i0: int,
    packed_b: int,
    out: Any,
    rounded: Any,
    j0: int,
    j1: int,
    space: Any,
    tiles: int,
    parts: int,
) -> None:
    """Fill columns j0 to j1 of float32 out (m, n) with rows of a, from row i0, times the packed b.

    The rows are `tiles` tiles high. `rounded` says where the sums come as bf16 numbers: the address of the
    first row, and the bytes from a row and a column to the next; the address is 0 if they do not. Then out
    holds the sums of earlier depths alone. `space` is this thread's memory: for one tile, and the parts of a
    block of a.
    """
    address, _, k, down, right, size = a
    m, n = out.shape
    panels, blocks = -(-n // COLUMNS), depths(k)
    own = board.address(space)
    packed_a, a_part = own + 4 * OWN, ROWS * tiles * PITCH
    once = rounded[0] != 0 and blocks == 1
    # Rows of bf16 numbers are words already, and need no packing: but those a multiple of 4 KiB apart would
    # push each other out of the first cache.
    in_place = GRAIN == 1 and size == right == 2 and k % 2 == 0 and down % 4 == 0 and down % 4096 != 0
    a_pitch = down // 4 if in_place else PITCH
    begin_tiles()
    for d in range(blocks):
        p0, p1 = depth_block(d, k)
        depth = p1 - p0
        x = (address + i0 * down + 2 * p0 * right, m, min(k, 2 * p1) - 2 * p0, down, right, size)
        if not in_place:
            bf16_packing.pack(x, packed_a, PITCH, 1, parts, 4 * a_part, depth, own)
        block_of_a = x[0] if in_place else packed_a
        block = packed_b + 4 * parts * p0 * panels * COLUMNS
        wide = max(1, AT_ONCE // (4 * COLUMNS * depth * parts)) * COLUMNS
        for first in range(j0, j1, wide):
            for t in range(tiles):
                i = t * height(m) // tiles
                rows = min(m, (t + 1) * height(m) // tiles) - i
                a_rows = block_of_a + 4 * i * a_pitch
                for j in range(first, min(first + wide, j1), COLUMNS):
                    width = min(COLUMNS, n - j)
                    whole = out.strides[1] == 4 and width == COLUMNS and (GRAIN == 1 or rows == ROWS)
                    sums, pitch = board.address(out) + i * out.strides[0] + 4 * j, out.strides[0] // 4
                    if once:
                        sums, pitch = own, COLUMNS
                    direct = whole or once
                    c, c_pitch, add = (sums, pitch, d) if direct else (own, COLUMNS, 0)
                    panel, b_part = block + 4 * j * depth, depth * panels * COLUMNS
                    add_products(
                        (rows, depth, a_pitch), parts, a_rows, a_part, panel, b_part, c, c_pitch, add
                    )
                    if not direct:
                        tile = board.elements(own, np.float32)
                        packed_product.put(tile, COLUMNS, out[i : i + rows, j : j + width], d)
                    if rounded[0] and d == blocks - 1:
                        target = rounded[0] + (i0 + i) * rounded[1] + j * rounded[2]
                        bf16_packing.put_rounded(sums, pitch, (rows, width), target, rounded[1], rounded[2])
    end_tiles()


@njit(boundscheck=False)
def all_finite(x: Any) -> bool:
    """Whether no element of a float32 array is infinite or NaN."""
    for i in range(x.shape[0]):
        most = np.uint32(0)
        if x.strides[1] == x.itemsize:
            row = carray(board.elements(board.address(x) + i * x.strides[0], np.uint32), x.shape[1])
            for j in range(x.shape[1]):
                most = max(most, np.uint32(row[j] & np.uint32(0x7FFFFFFF)))
        else:
            for j in range(x.shape[1]):
                most = max(most, np.uint32(bf16_packing.bits(x[i, j]) & np.uint32(0x7FFFFFFF)))
        if most >= np.uint32(0x7F800000):
            return False
    return True
