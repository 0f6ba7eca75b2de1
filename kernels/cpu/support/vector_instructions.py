"""Vector operations in LLVM's language, where a vector is a type, and functions of it for compiled code.

Given a loop over scalars, a compiler has to prove that it may use vectors, and chooses its own arrangement.
Here the arrangement is ours; LLVM chooses the instructions and the registers. Pointers are to one element,
and offsets count elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .vector_unit import vector_unit

INT64, INT32, VOID = ir.IntType(64), ir.IntType(32), ir.VoidType()
BYTES = ir.IntType(8).as_pointer()

Value = Any  # an LLVM value while code is built: llvmlite has no types


class Emitter(NamedTuple):
    """Where a call becomes LLVM's code: Numba's context, an IR builder, and the types of the arguments."""

    context: Any
    builder: Any
    kinds: tuple[Any, ...]


def emitted(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function for compiled code of `emit(emitter, *arguments)`, which writes what a call becomes.

    `kinds` are Numba's types of its parameters, None for the argument's own; `result` is one, or returns one
    for the arguments' types.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        @functools.wraps(emit)
        def define(context: Any, *given: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
                value = emit(Emitter(context, builder, signature.args), *arguments)
                return context.get_dummy_value() if value is None else value

            returned = result if isinstance(result, types.Type) else result(*given)
            return returned(
                *(own if kind is None else kind for kind, own in zip(kinds, given, strict=True))
            ), generate

        return intrinsic(define)

    return decorate


def call(builder: Any, name: str, result: Any, arguments: Sequence[Value]) -> Value:
    """Call LLVM's function `llvm.name`, which is declared here, and return its result."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}"), arguments)


def prefetch(builder: Any, address: Value) -> None:
    """Request a cache line for the first cache before it is written, without waiting; no address is wrong."""
    flags = [ir.Constant(INT32, flag) for flag in (1, 3, 1)]
    call(builder, "prefetch.p0", VOID, [address, *flags])


def lanes(element: Any) -> int:
    """Return how many elements of this Numba type a vector holds."""
    return vector_unit().lanes(np.dtype(element.name))


class Vectors:
    """Writes vector operations for one element type at the position of an IR builder.

    A vector is a whole register, or `most` elements. uint32 stands for pairs of bf16 numbers: they move as
    float32 does, and their products are added to float32.
    """

    def __init__(self, builder: Any, element: Any, most: int | None = None) -> None:
        self.builder = builder
        self.lanes = min(lanes(element), most or lanes(element))
        self.bytes = element.bitwidth // 8
        self.pairs = element is types.uint32
        scalar = ir.DoubleType() if element is types.float64 else ir.FloatType()
        self.pointer = scalar.as_pointer()
        self.type = ir.VectorType(scalar, self.lanes)
        self.zero = ir.Constant(self.type, [0.0] * self.lanes)
        self.undefined = ir.Constant(self.type, ir.Undefined)

    def offset(self, pointer: Value, elements: Value | int) -> Value:
        """The pointer, advanced by `elements`."""
        count = ir.Constant(INT64, elements) if isinstance(elements, int) else elements
        return self.builder.gep(pointer, [count])

    def opaque(self, pointer: Value) -> Value:
        """The pointer, as LLVM computes it here: it does not replace a pointer that advances by others."""
        same = ir.InlineAsm(ir.FunctionType(self.pointer, [self.pointer]), "", "=r,0")
        return self.builder.call(same, [pointer])

    def load(self, pointer: Value) -> Value:
        """The vector that starts at this element; it need not be aligned."""
        return self.builder.load(self.builder.bitcast(pointer, self.type.as_pointer()), align=self.bytes)

    def store(self, vector: Value, pointer: Value) -> None:
        """Write the vector to memory, starting at this element."""
        target = self.builder.bitcast(pointer, self.type.as_pointer())
        self.builder.store(vector, target, align=self.bytes)

    def spread(self, pointer: Value) -> Value:
        """One element, in every lane."""
        return self.every(self.builder.load(pointer))

    def every(self, x: Value) -> Value:
        """A scalar, in every lane."""
        first = self.builder.insert_element(self.undefined, x, ir.Constant(INT32, 0))
        return self.shuffle(first, self.undefined, [0] * self.lanes)

    def shuffle(self, x: Value, y: Value, order: Sequence[int]) -> Value:
        """Elements of x and y, numbered through, in this order."""
        mask = ir.Constant(ir.VectorType(INT32, self.lanes), list(order))
        return self.builder.shuffle_vector(x, y, mask)

    def multiply_add(self, x: Value, y: Value, total: Value) -> Value:
        """x * y + total, rounded once if the machine has an instruction for it."""
        if self.pairs:  # VDPBF16PS: both products of each pair
            kind, name = ir.VectorType(INT32, self.lanes), f"x86.avx512bf16.dpbf16ps.{32 * self.lanes}"
            pairs = [self.builder.bitcast(factor, kind) for factor in (x, y)]
            return call(self.builder, name, self.type, [total, *pairs])
        if not vector_unit().fused:  # LLVM would call a function for every element
            return self.builder.fadd(self.builder.fmul(x, y), total)
        return call(self.builder, f"fma.v{self.lanes}f{8 * self.bytes}", self.type, [x, y, total])
