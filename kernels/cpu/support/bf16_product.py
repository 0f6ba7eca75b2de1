"""Products of bf16 numbers, and of float32 numbers cut into bf16 parts: the loops around the tile.

Packed as words (`bf16_words.py`), a row of a and a panel of b look to the tile as rung 6's do, with half as
many steps: each multiplies a pair. With two parts of each number a product takes three products of parts,
a1 b1 + a1 b2 + a2 b1; with three it takes six. The least are added up first. What is left out is some
2**-16 of a product, and 2**-24.

Source: Henry, Tang and Heinecke, Leveraging the bfloat16 Artificial Intelligence Datatype For
Higher-Precision Computations, ARITH 2019, section II.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from . import atomic, bf16_words, board, packed_product, register_tile
from .matrix_unit import AMX, matrix_unit

COLUMNS = 32  # of a tile of out: two vectors, or two tiles side by side
PITCH = register_tile.PITCH  # words between rows of packed a
if matrix_unit() == AMX:
    from . import tile_registers
    from .tile_registers import add_products, begin_tiles, end_tiles

    DEPTH, GRAIN, ROWS = tile_registers.DEPTH, tile_registers.GRAIN, tile_registers.ROWS
else:
    # Words of a row of packed a at most, what their number is a multiple of, and the rows of a tile.
    DEPTH, GRAIN, ROWS = register_tile.DEPTH, 1, register_tile.ROWS

    @njit
    def begin_tiles() -> None:
        """Vectors need no preparation."""

    end_tiles = begin_tiles

    @njit(boundscheck=False, inline="always")
    def add_products(
        shape: Any, parts: int, a: int, a_part: int, b: int, b_part: int, c: int, c_pitch: int, add: int
    ) -> None:
        """The same as that of `tile_registers`, with vectors: a tile of out at a time, of `shape[0]` rows."""
        out = board.elements(c, np.float32)
        for level in range(parts - 1, -1, -1):
            for x in range(level + 1):
                a_x = board.elements(a + 4 * x * a_part, np.uint32)
                b_y = board.elements(b + 4 * (level - x) * b_part, np.uint32)
                whole = shape[0], COLUMNS, shape[1]
                register_tile.multiply(whole, a_x, PITCH, b_y, COLUMNS, out, c_pitch, add)
                add = 1


@njit(boundscheck=False)
def depth_block(d: int, k: int) -> tuple[int, int]:
    """Return where block d of the depth begins and ends, in pairs, for k rows of b."""
    grains = -(-k // (2 * GRAIN))
    blocks = -(-grains * GRAIN // DEPTH)
    return d * grains // blocks * GRAIN, (d + 1) * grains // blocks * GRAIN


@njit(boundscheck=False)
def depths(k: int) -> int:
    """Return the number of blocks into which the depth is cut."""
    grains = -(-k // (2 * GRAIN))
    return -(-grains * GRAIN // DEPTH)


@njit(boundscheck=False)
def where(at: int, place: int, size: int) -> tuple[int, int, int, int, int, int]:
    """Return where a (place 0) or b (1) on a board lies, as `bf16_words.pack` takes it."""
    start = board.ARRAY * place
    address, rows = board.number(at, start), board.number(at, start + 1)
    return (
        address,
        rows,
        board.number(at, start + 2),
        board.number(at, start + 3),
        board.number(at, start + 4),
        size,
    )


@njit(boundscheck=False, inline="always")
def pack_together(b: Any, to: int, at: int, packs: int, parts: int, own: int) -> None:
    """Pack b with the other threads of a board, as `shared_packing.pack_together` does.

    A piece is one of the `packs` side by side in each of b's depths. What another thread has taken and not
    marked as packed is packed again.
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
            rows = min(k, 2 * p1) - 2 * p0
            for part in range(parts):
                for panel in range(s * panels // packs, (s + 1) * panels // packs):
                    j = panel * COLUMNS
                    columns = min(COLUMNS, n - j), rows  # of the panel, turned over
                    x = (address + 2 * p0 * down + j * right, *columns, right, down, size)
                    target = to + 4 * COLUMNS * ((p0 * parts + part * depth) * panels + panel * depth)
                    bf16_words.pack(x, target, 1, COLUMNS, part, depth, own)
        if mine:
            atomic.store(flags + 8 * piece, 1)
        piece = board.take_to_pack(at) if mine else piece + 1


@njit(boundscheck=False, inline="always")
def multiply(
    a: Any, i0: int, packed_b: int, out: Any, j0: int, j1: int, space: Any, tiles: int, parts: int
) -> None:
    """Fill columns j0 to j1 of float32 out (m, n) with rows of a, from row i0, times the packed b.

    The rows are `tiles` tiles high. `space` is this thread's memory: for one tile, and the parts of a block
    of a.
    """
    address, _, k, down, right, size = a
    m, n = out.shape
    panels = -(-n // COLUMNS)
    own = board.address(space)
    packed_a = own + 4 * ROWS * COLUMNS
    a_part = ROWS * tiles * PITCH
    begin_tiles()
    for d in range(depths(k)):
        p0, p1 = depth_block(d, k)
        depth = p1 - p0
        for part in range(parts):
            x = (address + i0 * down + 2 * p0 * right, m, min(k, 2 * p1) - 2 * p0, down, right, size)
            bf16_words.pack(x, packed_a + 4 * part * a_part, PITCH, 1, part, depth, own)
        block = packed_b + 4 * parts * p0 * panels * COLUMNS
        for j in range(j0, j1, COLUMNS):
            width = min(COLUMNS, n - j)
            for t in range(tiles):
                i = t * m // tiles
                rows = (t + 1) * m // tiles - i
                direct = out.strides[1] == 4 and width == COLUMNS and (GRAIN == 1 or rows == ROWS)
                c = board.address(out) + i * out.strides[0] + 4 * j if direct else own
                pitch, add = (out.strides[0] // 4, d) if direct else (COLUMNS, 0)
                a_rows, panel = packed_a + 4 * i * PITCH, block + 4 * j * depth
                b_part = depth * panels * COLUMNS
                add_products((rows, depth), parts, a_rows, a_part, panel, b_part, c, pitch, add)
                if not direct:
                    tile = board.elements(own, np.float32)
                    packed_product.put(tile, COLUMNS, out[i : i + rows, j : j + width], d)
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
                most = max(most, np.uint32(bf16_words.bits(x[i, j]) & np.uint32(0x7FFFFFFF)))
        if most >= np.uint32(0x7F800000):
            return False
    return True
