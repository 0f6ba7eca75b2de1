"""Numbers as bf16, in pairs: what rung 8 packs, and how its sums are rounded.

A bf16 number is the upper half of a float32: its sign, its 8 bits of exponent and 7 of its 23 of fraction. So
rounding adds half of the last bit that stays, and cuts the lower half off. The unit takes numbers in pairs,
two neighbours in k, packed as words: the first is the lower half of a word, the second the upper.

A float32 has 24 significant bits, and three bf16 numbers hold all of them: the nearest one (part 0), the
nearest to what it leaves (part 1), and the nearest to what both leave (part 2). All parts of a vector are
written while it is in a register, so cutting float32 costs one pass over it.

Source: Henry, Tang and Heinecke, Leveraging the bfloat16 Artificial Intelligence Datatype For
Higher-Precision Computations, ARITH 2019, section II.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from . import board
from .bf16_instructions import matrix_unit
from .vector_instructions import INT32, INT64, Emitter, Value, call, emitted
from .vector_moves import transpose

SIDE = 16  # words, and numbers, in a vector
SQUARE = SIDE * SIDE
INTEGERS, FLOATS = ir.VectorType(INT32, SIDE), ir.VectorType(ir.FloatType(), SIDE)
HALVES = ir.VectorType(ir.IntType(16), SIDE)


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's type of bf16 numbers, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


@emitted(types.uint32, types.float32)
def bits(at: Emitter, x: Value) -> Any:
    """bits(x): the bits of a float32."""
    return at.builder.bitcast(x, INT32)


@emitted(types.float32, types.uint32)
def _number(at: Emitter, x: Value) -> Any:
    """_number(x): the float32 with these bits."""
    return at.builder.bitcast(x, ir.FloatType())


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


def _halves(builder: Any, x: Value) -> Value:
    """A vector of float32 as bf16, rounded by an instruction that every CPU with a matrix unit has.

    It takes subnormal numbers for 0, as the unit does.
    """
    kind = ir.VectorType(_BFloat(), SIDE)
    return builder.bitcast(call(builder, "x86.avx512bf16.cvtneps2bf16.512", kind, [x]), HALVES)


@emitted(types.void, *[types.intp] * 6)
def _words(
    at: Emitter, to: Value, step: Value, parts: Value, start: Value, beside: Value, size: Value
) -> None:
    """_words(to, step, parts, start, beside, size): write SIDE words of each part, `step` bytes apart.

    With `beside` 0 they are of the 2 * SIDE numbers at `start`, each of two that lie side by side. Otherwise
    they are of SIDE numbers there, each with its partner `beside` bytes on.
    """
    builder, number = at.builder, functools.partial(ir.Constant, INT64)
    in_a_row = builder.icmp_signed("==", beside, number(0))
    partner = builder.select(in_a_row, builder.mul(size, number(SIDE)), beside)

    def loaded(kind: Value) -> list[Value]:
        places = start, builder.add(start, partner)
        return [builder.load(builder.inttoptr(x, kind.as_pointer()), align=2) for x in places]

    def write(halves: list[Value], part: int) -> None:
        orders = range(2 * SIDE), [x for i in range(SIDE) for x in (i, SIDE + i)]
        masks = [ir.Constant(ir.VectorType(INT32, 2 * SIDE), list(order)) for order in orders]
        words = builder.select(in_a_row, *(builder.shuffle_vector(*halves, mask) for mask in masks))
        place = builder.add(to, builder.mul(step, number(part)))
        builder.store(words, builder.inttoptr(place, words.type.as_pointer()), align=2)

    if not matrix_unit():  # nor the instruction that rounds
        return
    with builder.if_else(builder.icmp_signed("==", size, number(2))) as (is_bf16, is_float32):
        with is_bf16:
            write(loaded(HALVES), 0)
        with is_float32, contextlib.ExitStack() as more:
            rest = loaded(FLOATS)
            for part in range(3):
                if part:
                    more.enter_context(builder.if_then(builder.icmp_signed(">", parts, number(part))))
                halves = [_halves(builder, x) for x in rest]
                write(halves, part)
                up = ir.Constant(INTEGERS, [16] * SIDE)
                taken = [builder.shl(builder.zext(half, INTEGERS), up) for half in halves]
                rest = [builder.fsub(x, builder.bitcast(y, FLOATS)) for x, y in zip(rest, taken, strict=True)]


VECTORS = bool(matrix_unit())  # whether `_words` writes anything


@njit(boundscheck=False)
def pack(x: Any, to: int, by_row: int, by_word: int, parts: int, step: int, depth: int, own: int) -> None:
    """Write the words of all parts of an array (rows, k) to the address `to`, parts `step` bytes apart.

    x says where it lies: its address, rows and k, the bytes from a row to the next and from a column to the
    next, and the bytes of a number: 4 of float32, 2 of bf16. The word of x[i, 2 p] and x[i, 2 p + 1] comes
    to word i * by_row + p * by_word, for p up to `depth`; what lies behind x's columns counts as 0. One of
    by_row and by_word is 1. `own` is the address of memory for SQUARE words of each part.
    """
    at, rows, k, down, right, size = x
    in_rows, beside = right == size, 0 if right == size else right
    # The words of a vector are of one row, or of one pair of columns. They lie like that in `to`, or a square
    # of them is turned over. The last vector starts back from the end, and writes some words again.
    direct = (by_word if in_rows else by_row) == 1
    height = 1 if in_rows and direct else SIDE  # rows at a time
    full = k // 2 if VECTORS and k >= 2 * SIDE and rows >= height and (in_rows or down == size) else 0
    for first in range(0, rows if full else 0, height):
        i = min(first, rows - height)
        for start in range(0, full, SIDE):
            p = min(start, full - SIDE)
            for line in range(height):
                r, q = (i + line, p) if in_rows else (i, p + line)
                target = to + 4 * (r * by_row + q * by_word) if direct else own + 4 * SIDE * line
                apart = step if direct else 4 * SQUARE
                _words(target, apart, parts, at + r * down + 2 * q * right, beside, size)
            for part in range(0 if direct else parts):
                target = board.elements(to + part * step + 4 * (i * by_row + p * by_word), np.float32)
                square = board.elements(own + 4 * SQUARE * part, np.float32)
                transpose(target, max(by_row, by_word), square, SIDE)
    for part in range(parts):
        words = board.elements(to + part * step, np.uint32)
        for i in range(rows):
            for p in range(full, depth):
                pair = at + i * down + 2 * p * right
                low = _part(pair, size, part) if 2 * p < k else np.uint32(0)
                high = _part(pair + right, size, part) if 2 * p + 1 < k else np.uint32(0)
                words[i * by_row + p * by_word] = np.uint32(low >> np.uint32(16)) | high


@njit(boundscheck=False)
def put_rounded(tile: int, pitch: int, shape: Any, to: int, down: int, right: int) -> None:
    """Round a tile of sums (rows, columns), `pitch` words from row to row, to bf16 numbers at `to`."""
    rows, columns = shape
    fast = VECTORS and columns == 2 * SIDE and right == 2
    for i in range(rows):
        sums, row = tile + 4 * i * pitch, to + i * down
        if fast:
            _words(row, 0, 1, sums, 0, 4)
        for j in range(0 if fast else columns):
            rounded = np.uint16(_part(sums + 4 * j, 4, 0) >> np.uint32(16))
            board.elements(row + j * right, np.uint16)[0] = rounded
