"""Products of bf16 numbers, and of float32 numbers cut into bf16 parts: packing, and loops around the tile.

A bf16 number is the upper half of a float32: its sign, its 8 bits of exponent and 7 of its 23 of fraction. So
rounding adds half of the last bit that stays, and cuts the lower half off. The unit takes numbers in pairs,
two neighbours in k, packed as words: the first is the lower half of a word, the second the upper.

A float32 has 24 significant bits, and three bf16 numbers hold all of them: the nearest one (part 0), the
nearest to what it leaves (part 1), and the nearest to what both leave (part 2). With two parts of each number
a product takes three products of parts, a1 b1 + a1 b2 + a2 b1; with three it takes six. The least are added
up first. What is left out is some 2**-16 of a product, and 2**-24.

To the tile a packed row of a and a packed panel of b look as rung 6's do, with half as many steps: each
multiplies a pair.

Source: Henry, Tang and Heinecke, Leveraging the bfloat16 Artificial Intelligence Datatype For
Higher-Precision Computations, ARITH 2019, section II.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..support import atomic, board, packed_product, register_tile
from .matrix_unit import AMX, matrix_unit
from .vector_instructions import INT32, Value
from .vector_moves import transpose

SIDE = 16  # words, and numbers, in a vector
INTEGERS, FLOATS = ir.VectorType(INT32, SIDE), ir.VectorType(ir.FloatType(), SIDE)


@intrinsic
def bits(context: Any, x: Any) -> Any:
    """bits(x): the bits of a float32."""
    return types.uint32(types.float32), lambda _, builder, __, given: builder.bitcast(given[0], INT32)


@intrinsic
def _number(context: Any, x: Any) -> Any:
    """_number(x): the float32 with these bits."""
    return types.float32(types.uint32), lambda _, builder, __, given: builder.bitcast(
        given[0], ir.FloatType()
    )


@njit(boundscheck=False)
def _nearest(u: Any) -> Any:
    """The bits of the bf16 number nearest to the float32 with the bits u, ties to even. A NaN stays a NaN."""
    half = np.uint32(np.uint32(0x7FFF) + np.uint32(np.uint32(u >> np.uint32(16)) & np.uint32(1)))
    is_nan = np.uint32(u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint32(
        (np.uint32(u | np.uint32(0x400000)) if is_nan else np.uint32(u + half)) & np.uint32(0xFFFF0000)
    )


@njit(boundscheck=False)
def _part(at: int, size: int, part: int) -> Any:
    """The bits of a part of the number at an address, of `size` bytes."""
    if size == 2:
        return np.uint32(np.uint32(board.elements(at, np.uint16)[0]) << np.uint32(16))
    rest = board.elements(at, np.uint32)[0]
    for _ in range(part):
        rest = bits(_number(rest) - _number(_nearest(rest)))
    return _nearest(rest)


def _vector(builder: Any, at: Value, size: Value, part: Value) -> Value:
    """The same for the SIDE numbers that start at an address."""

    def all_lanes(value: int) -> Value:
        return ir.Constant(INTEGERS, [value] * SIDE)

    def nearest(u: Value) -> Value:
        odd = builder.and_(builder.lshr(u, all_lanes(16)), all_lanes(1))
        rounded = builder.add(u, builder.add(odd, all_lanes(0x7FFF)))
        magnitude = builder.and_(u, all_lanes(0x7FFFFFFF))
        is_nan = builder.icmp_unsigned(">", magnitude, all_lanes(0x7F800000))
        kept = builder.select(is_nan, builder.or_(u, all_lanes(0x400000)), rounded)
        return builder.and_(kept, all_lanes(0xFFFF0000))

    found = cgutils.alloca_once(builder, INTEGERS)
    narrow = ir.VectorType(ir.IntType(16), SIDE)
    with builder.if_else(builder.icmp_signed("==", size, ir.Constant(size.type, 2))) as (is_bf16, is_float32):
        with is_bf16:
            loaded = builder.load(builder.inttoptr(at, narrow.as_pointer()), align=2)
            builder.store(builder.shl(builder.zext(loaded, INTEGERS), all_lanes(16)), found)
        with is_float32:
            builder.store(builder.load(builder.inttoptr(at, INTEGERS.as_pointer()), align=4), found)
            for level in range(2):
                with builder.if_then(builder.icmp_signed(">", part, ir.Constant(part.type, level))):
                    u = builder.load(found)
                    left = builder.fsub(builder.bitcast(u, FLOATS), builder.bitcast(nearest(u), FLOATS))
                    builder.store(builder.bitcast(left, INTEGERS), found)
            builder.store(nearest(builder.load(found)), found)
    return builder.load(found)


@intrinsic
def _words(context: Any, to: Any, at: Any, beside: Any, size: Any, part: Any) -> Any:
    """_words(to, at, beside, size, part): write SIDE words to an address.

    With `beside` 0 they are of the 2 * SIDE numbers at `at`, each of two that lie side by side. Otherwise
    they are of SIDE numbers there, each with its partner `beside` bytes on.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        to_, at_, beside_, size_, part_ = arguments
        zero = ir.Constant(beside_.type, 0)
        in_a_row = builder.icmp_signed("==", beside_, zero)
        lanes = builder.mul(size_, ir.Constant(size_.type, SIDE))
        x = _vector(builder, at_, size_, part_)
        y = _vector(builder, builder.add(at_, builder.select(in_a_row, lanes, beside_)), size_, part_)
        first, second = (
            builder.select(in_a_row, builder.shuffle_vector(x, y, ir.Constant(INTEGERS, order)), whole)
            for whole, order in ((x, list(range(0, 2 * SIDE, 2))), (y, list(range(1, 2 * SIDE, 2))))
        )
        word = builder.or_(builder.lshr(first, ir.Constant(INTEGERS, [16] * SIDE)), second)
        builder.store(word, builder.inttoptr(to_, INTEGERS.as_pointer()), align=4)
        return context.get_dummy_value()

    integer = types.intp
    return types.void(integer, integer, integer, integer, integer), generate


@njit(boundscheck=False)
def pack(x: Any, to: int, by_row: int, by_word: int, part: int, depth: int, own: int) -> None:
    """Write words of a part of an array (rows, k) to the address `to`.

    x says where it lies: its address, rows and k, the bytes from a row to the next and from a column to the
    next, and the bytes of a number: 4 of float32, 2 of bf16. The word of x[i, 2 p] and x[i, 2 p + 1] comes
    to word i * by_row + p * by_word, for p up to `depth`; what lies behind x's columns counts as 0. One of
    by_row and by_word is 1. `own` is the address of memory for SIDE * SIDE words.
    """
    at, rows, k, down, right, size = x
    full, high = k // (2 * SIDE) * SIDE, rows // SIDE * SIDE
    in_rows, beside = right == size, 0 if right == size else right
    # The words of a vector are of one row, or of one pair of columns. They lie like that in `to`, or a square
    # of them is turned over.
    direct = (by_word if in_rows else by_row) == 1
    done = rows if in_rows and direct else high  # rows of which `full` words are done
    if not in_rows and down != size:
        done = 0
    step = 1 if in_rows and direct else SIDE
    for i in range(0, done, step):
        for p in range(0, full, SIDE):
            for line in range(step):
                r, q = (i + line, p) if in_rows else (i, p + line)
                target = to + 4 * (r * by_row + q * by_word) if direct else own + 4 * SIDE * line
                _words(target, at + r * down + 2 * q * right, beside, size, part)
            if not direct:
                target = board.elements(to + 4 * (i * by_row + p * by_word), np.float32)
                transpose(target, max(by_row, by_word), board.elements(own, np.float32), SIDE)
    words = board.elements(to, np.uint32)
    for i in range(rows):
        for p in range(full if i < done else 0, depth):
            pair = at + i * down + 2 * p * right
            low = _part(pair, size, part) if 2 * p < k else np.uint32(0)
            high_half = _part(pair + right, size, part) if 2 * p + 1 < k else np.uint32(0)
            words[i * by_row + p * by_word] = np.uint32(low >> np.uint32(16)) | high_half


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
    """Return where a (place 0) or b (1) on a board lies, as `pack` takes it."""
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
                    pack(x, target, 1, COLUMNS, part, depth, own)
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
            pack(x, packed_a + 4 * part * a_part, PITCH, 1, part, depth, own)
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
                most = max(most, np.uint32(bits(x[i, j]) & np.uint32(0x7FFFFFFF)))
        if most >= np.uint32(0x7F800000):
            return False
    return True
