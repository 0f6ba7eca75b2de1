"""What a softmax does with a row of scores, in whole vectors: the largest, and powers of 2 with their sum.

The C library's exp takes one number at a time, some 5 ns, which is longer than a score's share of both matrix
products. Here a vector of powers takes a dozen instructions: 2^y = 2^n 2^f, where n is y rounded to a whole
number, whose 2^n is bits of the exponent, and 2^f for f in [-1/2, 1/2] is a polynomial. Its relative error is
8e-8, two thirds of what float32 can tell apart. A softmax in base 2 is the same softmax if scores are
multiplied by log2(e) before.

These are functions in LLVM's language, which Numba's code calls like its own. Pointers are to float32, and a
count is rounded up to whole vectors: what lies behind a row is read and written, too.

Source: Muller, Elementary Functions, 3rd ed. 2016, chapter 11 (reducing the argument); the coefficients are a
Chebyshev fit of 2^f by degree 5, with weights for the relative error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ...support.vector_instructions import INT32, INT64, Emitter, Value, Vectors, call, emitted

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
POWERS = (1.00000007, 0.69314695, 0.24022122, 0.055507426, 0.0096754597, 0.0013266970)  # of f, from f^0
LEAST, BIAS, FRACTION = -127.0, 127, 23  # of n; float32 keeps BIAS + n, above so many bits of the fraction
CHAINS = 4  # of operations that need not wait for each other's results
POINTER, REAL, COUNT = types.CPointer(types.float32), types.float32, types.intp


class Rows(Vectors):
    """Writes loops over rows of float32."""

    def of(self, number: float) -> Value:
        """A number that is known when compiling, in every lane."""
        return ir.Constant(self.type, [number] * self.lanes)

    def larger(self, x: Value, y: Value) -> Value:
        """The larger element in each lane: one instruction, since NaN in y is NaN here."""
        return self.builder.select(self.builder.fcmp_ordered(">", x, y), x, y)

    def power_of_2(self, y: Value) -> Value:
        """2 to the power of each element; 0 where that is too small for float32. No element exceeds 127."""
        y = self.larger(self.of(LEAST), y)
        whole = call(self.builder, f"nearbyint.v{self.lanes}f32", self.type, [y])
        f, power = self.builder.fsub(y, whole), self.of(POWERS[-1])
        for coefficient in POWERS[-2::-1]:
            power = self.multiply_add(power, f, self.of(coefficient))
        integers = ir.VectorType(INT32, self.lanes)
        n = self.builder.fptosi(whole, integers)
        bits = self.builder.add(n, ir.Constant(integers, [BIAS] * self.lanes))
        bits = self.builder.shl(bits, ir.Constant(integers, [FRACTION] * self.lanes))
        return self.builder.fmul(power, self.builder.bitcast(bits, self.type))

    def loop(self, count: Value, chains: int) -> Any:
        """A loop over whole vectors, `chains` at a time, and one over those left: yields (index, chains)."""
        size = ir.Constant(INT64, self.lanes)
        vectors = self.builder.sdiv(self.builder.add(count, ir.Constant(INT64, self.lanes - 1)), size)
        together = ir.Constant(INT64, chains)
        whole = self.builder.sub(vectors, self.builder.srem(vectors, together))
        for start, stop, step in ((ir.Constant(INT64, 0), whole, chains), (whole, vectors, 1)):
            steps = cgutils.for_range_slice(self.builder, start, stop, ir.Constant(INT64, step), inc=True)
            with steps as (index, _):
                yield self.builder.mul(index, size), step

    def folded(self, sums: Iterable[Value], join: Any) -> Value:
        """All vectors joined, then all lanes: one number."""
        first, *others = (self.builder.load(each) for each in sums)
        for other in others:
            first = join(first, other)
        width = self.lanes
        while width > 1:
            width //= 2
            order = [(lane + width) % self.lanes for lane in range(self.lanes)]
            first = join(first, self.shuffle(first, self.undefined, order))
        return self.builder.extract_element(first, ir.Constant(INT32, 0))


@emitted(REAL, POINTER, COUNT)
def largest(at: Emitter, row: Value, count: Value) -> Any:
    """largest(row, count): the largest of so many numbers."""
    v = Rows(at.builder, REAL)
    tops = [cgutils.alloca_once_value(at.builder, v.of(float("-inf"))) for _ in range(CHAINS)]
    for start, chains in v.loop(count, CHAINS):
        for chain in range(chains):
            x = v.load(v.offset(v.offset(row, start), chain * v.lanes))
            at.builder.store(v.larger(at.builder.load(tops[chain]), x), tops[chain])
    return v.folded(tops, v.larger)


@emitted(REAL, POINTER, COUNT, REAL, REAL)
def powers(at: Emitter, row: Value, count: Value, scale: Value, shift: Value) -> Any:
    """powers(row, count, scale, shift): row = 2^(row * scale - shift), none above 1; returns their sum."""
    v, builder = Rows(at.builder, REAL), at.builder
    scales, minus = v.every(scale), v.every(builder.fneg(shift))
    sums = [cgutils.alloca_once_value(builder, v.zero) for _ in range(CHAINS)]
    for start, chains in v.loop(count, CHAINS):
        for chain in range(chains):
            place = v.offset(v.offset(row, start), chain * v.lanes)
            power = v.power_of_2(v.multiply_add(v.load(place), scales, minus))
            v.store(power, place)
            builder.store(builder.fadd(builder.load(sums[chain]), power), sums[chain])
    return v.folded(sums, builder.fadd)


@emitted(types.void, POINTER, COUNT, REAL)
def scaled(at: Emitter, row: Value, count: Value, factor: Value) -> Any:
    """scaled(row, count, factor): row = row * factor."""
    v = Rows(at.builder, REAL)
    factors = v.every(factor)
    for start, _ in v.loop(count, 1):
        v.store(at.builder.fmul(v.load(v.offset(row, start)), factors), v.offset(row, start))


@emitted(types.void, POINTER, POINTER, COUNT, REAL, POINTER, POINTER)
def gradients(
    at: Emitter, scores: Value, slopes: Value, count: Value, scale: Value, shifts: Value, means: Value
) -> Any:
    """gradients(scores, slopes, count, scale, shifts, means): what backward does with a row.

    scores becomes p = 2^(scores * scale - shifts), and slopes, the gradients of p, p (slopes - means): those
    of the scores but for the factor that multiplied them. `shifts` and `means` are rows, too.
    """
    v, builder = Rows(at.builder, REAL), at.builder
    scales = v.every(scale)
    for start, chains in v.loop(count, 2):
        for chain in range(chains):
            where = builder.add(start, ir.Constant(INT64, chain * v.lanes))
            s, w, shift, mean = (v.offset(x, where) for x in (scores, slopes, shifts, means))
            y = v.multiply_add(v.load(s), scales, builder.fneg(v.load(shift)))
            p = v.power_of_2(y)
            v.store(p, s)
            v.store(builder.fmul(p, builder.fsub(v.load(w), v.load(mean))), w)
