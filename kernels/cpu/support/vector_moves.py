"""Addresses in arrays, and moves of whole vectors: what packing is made of.

They are functions in LLVM's language that Numba's code calls like its own. Pointers are Numba's `CPointer` to
an element, and strides count elements.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .vector_instructions import INT64, Value, Vectors, lanes


@intrinsic
def vector(context: Any, array: Any) -> Any:
    """vector(array): the elements of one vector of this array's dtype, known when compiling."""
    count = lanes(array.dtype)
    return types.intp(array), lambda *_: ir.Constant(INT64, count)


@intrinsic
def pointer(context: Any, array: Any, i: Any, j: Any) -> Any:
    """pointer(array, i, j): the address of array[i, j], for an array of any strides."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        made = context.make_array(signature.args[0])(context, builder, arguments[0])
        indices = arguments[1:]
        return cgutils.get_item_pointer(context, builder, signature.args[0], made, indices, wraparound=False)

    return types.CPointer(array.dtype)(array, types.intp, types.intp), generate


@intrinsic
def offset(context: Any, start: Any, elements: Any) -> Any:
    """offset(pointer, elements): the pointer, advanced by `elements`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        return builder.gep(arguments[0], [arguments[1]])

    return start(start, types.intp), generate


@intrinsic
def move(context: Any, to: Any, source: Any) -> Any:
    """move(to, source): copy one vector."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        v = Vectors(builder, to.dtype)
        v.store(v.load(arguments[1]), arguments[0])
        return context.get_dummy_value()

    return types.void(to, to), generate


@intrinsic
def transpose(context: Any, to: Any, pitch: Any, source: Any, stride: Any) -> Any:
    """transpose(to, pitch, source, stride): to[r * pitch + c] = source[c * stride + r], in a square.

    The square's side is one vector. Zipping the first half of a sequence of vectors with the second rotates
    each element's index (vector, lane) by one bit. After as many rounds as the lanes have bits, vector and
    lane have changed places.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        to_, pitch_, source_, stride_ = arguments
        v = Vectors(builder, to.dtype)
        half = v.lanes // 2
        low = [x for i in range(half) for x in (i, v.lanes + i)]  # x0 y0 x1 y1 ...
        high = [x + half for x in low]
        rows = [
            v.load(v.offset(source_, builder.mul(stride_, ir.Constant(INT64, i)))) for i in range(v.lanes)
        ]
        for _ in range(v.lanes.bit_length() - 1):
            pairs = zip(rows[:half], rows[half:], strict=True)
            rows = [v.shuffle(x, y, order) for x, y in pairs for order in (low, high)]
        for i, row in enumerate(rows):
            v.store(row, v.offset(to_, builder.mul(pitch_, ir.Constant(INT64, i))))
        return context.get_dummy_value()

    return types.void(to, types.intp, to, types.intp), generate
