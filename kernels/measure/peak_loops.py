"""Loops that do one thing as fast as a core can: multiply and add in registers, and stream from memory.

All are written in LLVM's language. A loop in Python would leave to the compiler what is to be measured: that
the first loops hold nothing but multiply-adds, and that the last writes its result without reading it
first. Importing this file imports Numba; a loop is compiled at its first call.

Source of the last: McCalpin, Memory Bandwidth and Machine Balance in Current High Performance Computers,
IEEE TCCA Newsletter, December 1995 (STREAM), the kernel called triad.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import DTypeLike

from ..cpu.support.vector_instructions import Emitter, Vectors, emitted
from ..cpu.support.vector_unit import vector_unit
from ..rung import Array, empty

# An FMA takes 3 to 5 cycles until its result can be used, and a core starts 1 to 4 in a cycle, so 8 to 16
# sums have to be under way at any time. Two of the other registers hold the factor and the addend.
SUMS = vector_unit().registers * 3 // 4


def registers(dtype: DTypeLike) -> Array:
    """Return the start values of `fma`, (2 + SUMS, lanes): a factor, an addend, and the sums.

    x = x * 0.5 + 1 approaches 2 from anywhere: it neither overflows nor decays to denormal numbers, which
    some cores handle slowly. The sums start differently; otherwise the compiler would keep only one of them.
    Of uint32, pairs of bf16 numbers: the products of (1, -1) and (1, 1), which cancel, are added to float32.
    """
    rows = empty(2 + SUMS, vector_unit().lanes(dtype), dtype)
    pairs = rows.dtype == np.uint32
    rows[0], rows[1] = (0xBF80_3F80, 0x3F80_3F80) if pairs else (0.5, 1.0)
    sums = rows[2:].view(np.float32) if pairs else rows[2:]
    sums[...] = np.arange(sums.size).reshape(sums.shape)
    return rows


def flops_per_turn(dtype: DTypeLike) -> int:
    """Return the operations in one turn of `fma`: in each lane a multiplication and an addition, or two."""
    return (4 if np.dtype(dtype) == np.uint32 else 2) * SUMS * vector_unit().lanes(dtype)


@emitted(types.void, None, types.intp)
def _repeat(at: Emitter, rows: Any, turns: Any) -> None:
    builder, v = at.builder, Vectors(at.builder, at.kinds[0].dtype)
    start = _data(at, rows)
    rows_at = [v.offset(start, row * v.lanes) for row in range(2 + SUMS)]
    factor, addend, *first = (v.load(pointer) for pointer in rows_at)
    # Variables on the stack, which LLVM turns into registers.
    sums = [cgutils.alloca_once_value(builder, value) for value in first]
    with cgutils.for_range(builder, turns):
        for total in sums:
            x = builder.load(total)
            given = (factor, addend, x) if v.pairs else (x, factor, addend)
            builder.store(v.multiply_add(*given), total)
    for pointer, total in zip(rows_at[2:], sums, strict=True):
        v.store(builder.load(total), pointer)


# Without the GIL, so that all cores run it at once, a thread each.
@numba.njit(nogil=True)
def fma(rows: Array, turns: int) -> None:
    """Do sum = sum * factor + addend with each sum, `turns` times; `rows` is what `registers` returns.

    The sums stay in registers until the end. On a machine without FMA, a turn is a multiplication and an
    addition each.
    """
    _repeat(rows, turns)


TILE_FLOPS = 4 * 2 * 16 * 16 * 32  # in one turn of `tiles`


@functools.cache
def tiles() -> Callable[[int], None]:
    """Return the function tiles(turns), for a CPU with AMX: four products of tiles, `turns` times."""
    from ..cpu.support import tile_registers as unit

    @numba.njit(nogil=True)
    def loop(turns: int) -> None:
        unit.begin_tiles()
        unit.zero0(), unit.zero1(), unit.zero2(), unit.zero3()
        for _ in range(turns):
            unit.add0(), unit.add1(), unit.add2(), unit.add3()
        unit.end_tiles()

    compiled: Callable[[int], None] = loop
    return compiled


@functools.cache
def triad(streaming: bool) -> Callable[[Array, Array, Array, float], None]:
    """Return the function triad(a, b, c, scale): a = b + scale * c, float64 arrays of one length.

    With `streaming` the stores are non-temporal: the result goes to memory past the caches. An ordinary store
    first reads the cache line that it writes, 8 bytes more per element than the 24 that STREAM counts. The
    arrays must start on a cache line and fill their last one; nothing checks that here.
    """

    @emitted(types.void, None, None, None, types.float64)
    def stream(at: Emitter, a: Any, b: Any, c: Any, scale: Any) -> None:
        builder, v = at.builder, Vectors(at.builder, types.float64)
        a_, b_, c_ = (_data(at, array) for array in (a, b, c))
        size = at.context.make_array(at.kinds[0])(at.context, builder, a).nitems
        factor = v.spread(cgutils.alloca_once_value(builder, scale))
        vectors = builder.sdiv(size, ir.Constant(size.type, v.lanes))
        with cgutils.for_range(builder, vectors) as loop:
            start = builder.mul(loop.index, ir.Constant(size.type, v.lanes))
            result = v.multiply_add(v.load(v.offset(c_, start)), factor, v.load(v.offset(b_, start)))
            target = builder.bitcast(v.offset(a_, start), v.type.as_pointer())
            store = builder.store(result, target, align=vector_unit().register_bytes)
            if streaming:
                one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
                store.set_metadata("nontemporal", one)
        builder.fence("seq_cst")  # non-temporal stores wait in buffers: done means that they have left

    @numba.njit(nogil=True)
    def loop(a: Array, b: Array, c: Array, scale: float) -> None:
        stream(a, b, c, scale)

    compiled: Callable[[Array, Array, Array, float], None] = loop
    return compiled


def _data(at: Emitter, array: Any) -> Any:
    """Return the pointer to the first element of a Numba array, of the first argument's type."""
    return at.context.make_array(at.kinds[0])(at.context, at.builder, array).data
