"""The register tile: the innermost loop of a matrix product, built from vector instructions.

A tile of the product, ROWS rows of two vectors, stays in registers while the sum runs over p. Each p loads
two vectors of b and, for each row, one element of a, spread over a vector. That gives two fused multiply-adds
a row. With AVX-512 these are 16 loads for 28 operations on 16 elements each, and no store, so arithmetic is
the limit, not memory.

A tile written as a Numba array does not stay in registers and is 50 times slower. So the tile is written in
LLVM's language, as functions that Numba's code calls like its own; `packed_product.py` uses them. Pointers
are Numba's `CPointer` to an element, and strides count elements.

Source: Van Zee and van de Geijn, BLIS: A Framework for Rapidly Instantiating BLAS Functionality, ACM TOMS
2015, section 3.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numpy.typing import DTypeLike

from .vector_instructions import BYTES, INT64, VOID, Emitter, Value, Vectors, emitted, lanes, prefetch
from .vector_unit import vector_unit

VECTORS = 2  # in a row of the tile
ROWS = vector_unit().tile_rows
# Elements between rows of packed a. It is a constant, so that a row is the same address with another offset,
# and not a power of two, so that the rows of a tile fall into different sets of the cache.
PITCH = 784
DEPTH = 768  # elements of such a row that are used at most
LATE = 48  # steps of p before the end of a sum, when the lines of c are prefetched
INTEGER = types.intp


def tile_columns(dtype: DTypeLike) -> int:
    """Return the columns of a tile."""
    return VECTORS * vector_unit().lanes(dtype)


@emitted(types.intp, None)
def columns(at: Emitter, array: Value) -> Any:
    """columns(array): the columns of a tile for this array's dtype, known when compiling."""
    return ir.Constant(INT64, VECTORS * lanes(at.kinds[0].dtype))


@emitted(types.void, types.UniTuple(INTEGER, 3), None, INTEGER, None, INTEGER, None, INTEGER, INTEGER)
def _multiply(
    at: Any, shape: Any, a: Any, a_pitch: Any, b: Any, b_pitch: Any, c: Any, c_pitch: Any, add: Any
) -> None:
    # Each shape of the tile has its own function: the sums are registers, and registers have no index.
    builder, element = at.builder, at.kinds[1].dtype
    rows, width, depth = cgutils.unpack_tuple(builder, shape)
    done = builder.append_basic_block("done")
    widths = [lanes(element) * half // 2 for half in (1, 2, 4)][2 * (element is types.uint32) :]
    kind = rows  # and ROWS times the number of the width
    for narrower in widths[:-1]:
        wider = builder.zext(builder.icmp_signed(">", width, ir.Constant(INT64, narrower)), INT64)
        kind = builder.add(kind, builder.mul(wider, ir.Constant(INT64, ROWS)))
    choice = builder.switch(kind, done)
    for number, most in enumerate(widths):
        for count in range(1, ROWS + 1):
            with builder.goto_block(builder.append_basic_block()):
                choice.add_case(ir.Constant(INT64, number * ROWS + count), builder.block)
                tile = _tile(builder.module, element, count, most)
                operands = zip((depth, a, a_pitch, b, b_pitch, c, c_pitch, add), tile.args, strict=True)
                builder.call(tile, [builder.bitcast(x, y.type) for x, y in operands])
                builder.branch(done)
    builder.position_at_end(done)


@njit(boundscheck=False, inline="always")
def multiply(shape: Any, a: Any, a_pitch: int, b: Any, b_pitch: int, c: Any, c_pitch: int, add: int) -> None:
    """A tile of c = a b, or of c += a b with `add`; shape is (rows, width, depth).

    a: 1 to ROWS rows; b: `depth` rows; c: as many as a. A pitch is the distance from a row to the next. The
    least of half a vector, one and two that hold `width` columns is read and written; of bf16, two. It is
    inlined, as its callers are: Numba makes other functions' machine code anew with all that they call.
    """
    _multiply(shape, a, a_pitch, b, b_pitch, c, c_pitch, add)


def _tile(module: Any, element: Any, rows: int, width: int) -> Any:
    """Return the function (depth, a, a_pitch, b, b_pitch, c, c_pitch, add) for a tile of this shape."""
    pointer = Vectors(ir.IRBuilder(), element).pointer
    kind = ir.FunctionType(VOID, [INT64, *[pointer, INT64] * 3, INT64])
    function = cgutils.get_or_insert_function(module, kind, f"tile_{element.name}_{rows}_{width}")
    if not function.is_declaration:
        return function
    function.linkage = "internal"
    function.attributes.add("noinline")
    depth, a, a_pitch, b, b_pitch, c, c_pitch, add = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    v = Vectors(builder, element, width)
    grid = [(row, column) for row in range(rows) for column in range(0, width, v.lanes)]

    def place(row: int, column: int) -> Value:
        return v.offset(v.offset(c, builder.mul(c_pitch, ir.Constant(INT64, row))), column)

    # Stack variables, which LLVM turns into registers.
    sums = {at: cgutils.alloca_once_value(builder, v.zero) for at in grid}

    # Every third row of a has a pointer; the two rows after it are one and two pitches away, which a load
    # adds by itself. A pointer for each row would not fit the registers.
    two_pitches = builder.add(a_pitch, a_pitch)
    a_rows = [
        cgutils.alloca_once_value(builder, v.offset(a, builder.mul(a_pitch, ir.Constant(INT64, row))))
        for row in range(0, rows, 3)
    ]
    b_row = cgutils.alloca_once_value(builder, b)

    def add_products(start: Value, stop: Value) -> None:
        step = ir.Constant(INT64, 1)
        with cgutils.for_range_slice(builder, start, stop, step, inc=True) as _:
            b_vectors = {at: v.load(v.offset(builder.load(b_row), at)) for at in range(0, width, v.lanes)}
            for row in range(rows):
                third = builder.load(a_rows[row // 3])
                a_element = v.spread(v.offset(third, (0, a_pitch, two_pitches)[row % 3]))
                for column, b_vector in b_vectors.items():
                    total = sums[row, column]
                    builder.store(v.multiply_add(a_element, b_vector, builder.load(total)), total)
            for pointer, step_ in ((b_row, b_pitch), *((a_row, 1) for a_row in a_rows)):
                builder.store(v.opaque(v.offset(builder.load(pointer), step_)), pointer)

    # Prefetch the lines of c shortly before they are needed; earlier, b would push them out of the first
    # cache again. Without the prefetch a product takes 3% longer. Narrow tiles are few: they do without it.
    late = zero = ir.Constant(INT64, 0)
    if width > v.lanes:
        early = builder.sub(depth, ir.Constant(INT64, LATE))
        late = builder.select(builder.icmp_signed(">", early, zero), early, zero)
        add_products(zero, late)
        for at in grid:
            prefetch(builder, builder.bitcast(place(*at), BYTES))
    add_products(late, depth)
    with builder.if_else(builder.icmp_signed("!=", add, ir.Constant(INT64, 0))) as (adding, setting):
        with adding:
            for at in grid:
                v.store(builder.fadd(v.load(place(*at)), builder.load(sums[at])), place(*at))
        with setting:
            for at in grid:
                v.store(builder.load(sums[at]), place(*at))
    builder.ret_void()
    return function
