"""Words of two bf16 numbers, made of float32 numbers or of bf16 ones: packing for the matrix unit.

A bf16 number is the upper half of a float32: its sign, its 8 bits of exponent and 7 of its 23 of fraction. So
rounding adds half of the last bit that stays, and cuts the lower half off. The unit takes numbers in pairs,
two neighbours in k: the first is the lower half of a word, the second the upper.

A float32 has 24 significant bits, and three bf16 numbers hold all of them: the nearest one (part 0), the
nearest to what it leaves (part 1), and the nearest to what both leave (part 2).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from . import board
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
