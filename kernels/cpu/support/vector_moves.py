"""Addresses in arrays, and moves of whole vectors: what packing is made of.

They are functions in LLVM's language that Numba's code calls like its own. Pointers are Numba's `CPointer` to
an element, and strides count elements.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .vector_instructions import INT64, Emitter, Value, Vectors, emitted, lanes


@emitted(types.intp, None)
def vector(at: Emitter, array: Value) -> Any:
    """vector(array): the elements of one vector of this array's dtype, known when compiling."""
    return ir.Constant(INT64, lanes(at.kinds[0].dtype))


@emitted(lambda array, i, j: types.CPointer(array.dtype), None, types.intp, types.intp)
def pointer(at: Emitter, array: Value, i: Value, j: Value) -> Any:
    """pointer(array, i, j): the address of array[i, j], for an array of any strides."""
    kind = at.kinds[0]
    made = at.context.make_array(kind)(at.context, at.builder, array)
    return cgutils.get_item_pointer(at.context, at.builder, kind, made, (i, j), wraparound=False)


@emitted(lambda start, elements: start, None, types.intp)
def offset(at: Emitter, start: Value, elements: Value) -> Any:
    """offset(pointer, elements): the pointer, advanced by `elements`."""
    return at.builder.gep(start, [elements])


@emitted(types.void, None, None)
def move(at: Emitter, to: Value, source: Value) -> Any:
    """move(to, source): copy one vector."""
    v = Vectors(at.builder, at.kinds[0].dtype)
    v.store(v.load(source), to)


@emitted(types.void, None, types.intp, None, types.intp)
def transpose(at: Emitter, to: Value, pitch: Value, source: Value, stride: Value) -> Any:
    """transpose(to, pitch, source, stride): to[r * pitch + c] = source[c * stride + r], in a square.

    The square's side is one vector. Zipping the first half of a sequence of vectors with the second rotates
    each element's index (vector, lane) by one bit. After as many rounds as the lanes have bits, vector and
    lane have changed places.
    """
    v = Vectors(at.builder, at.kinds[0].dtype)
    half = v.lanes // 2
    low = [x for i in range(half) for x in (i, v.lanes + i)]  # x0 y0 x1 y1 ...
    high = [x + half for x in low]
    rows = [v.load(v.offset(source, at.builder.mul(stride, ir.Constant(INT64, i)))) for i in range(v.lanes)]
    for _ in range(v.lanes.bit_length() - 1):
        pairs = zip(rows[:half], rows[half:], strict=True)
        rows = [v.shuffle(x, y, order) for x, y in pairs for order in (low, high)]
    for i, row in enumerate(rows):
        v.store(row, v.offset(to, at.builder.mul(pitch, ir.Constant(INT64, i))))
