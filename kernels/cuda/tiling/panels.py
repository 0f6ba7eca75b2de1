"""Shared by rungs 6 to 8: panels of a and b in shared memory, stores of four elements of c, unrolled loops.

A panel is what a block needs of one operand for some steps of p: (depth, side) elements in shared memory, one
step per row, so that four neighbours of it are one load of 16 bytes. An operand is seen as (side, depth): a
itself, or b transposed. In order "rows" it has unit stride along p.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda, int32, int64

from ..instructions.copies import cp_async_4_zfill, cp_async_16_or_zeros, store_128
from ..runtime.matrix import Matrix, StorageOrder
from .packing import packed

Function = Callable[..., Any]

ALIGNMENT = 16  # bytes, of shared arrays that are accessed 16 bytes at a time


def inlined(function: Function) -> Function:
    """Make a function for kernels that is inlined at its call, so its local arrays become registers."""
    made: Function = cuda.jit(device=True, forceinline=True)(function)
    return made


def unrolled(step: Function, count: int) -> Function:
    """Return a function that calls step(p, *its arguments) for p from 0 to count - 1, without a loop.

    p is a constant in each call, so it can select registers. LLVM unrolls only short loops. Four calls stand
    in one function where they can: Numba compiles each function for hundredths of a second.
    """
    if count == 0:

        def run(*arguments):  # type: ignore[no-untyped-def]
            pass

    elif count % 4:
        last = count - 1
        before = unrolled(step, last)

        def run(*arguments):  # type: ignore[no-untyped-def]
            before(*arguments)
            step(last, *arguments)

    else:
        p = count - 4
        before = unrolled(step, p)

        def run(*arguments):  # type: ignore[no-untyped-def]
            before(*arguments)
            step(p, *arguments)
            step(p + 1, *arguments)
            step(p + 2, *arguments)
            step(p + 3, *arguments)

    return inlined(run)


def operand(x: Matrix) -> Matrix:
    """Return x (side, depth) as `panel` can copy it: x itself, or packed, which reads and writes it once.

    It is packed if neither side has unit stride, or if the side has it and its lines do not begin and end on
    16 bytes.
    """
    return x if x.order == "rows" else packed(x, 4, padded=True)


def pitch(x: Matrix) -> int:
    """Return the stride of an operand that is not 1."""
    return x.row_stride if x.order == "rows" else x.column_stride


@functools.cache  # rungs' kernels share what Numba has compiled for another of them
def panel(
    order: StorageOrder, side: int, depth: int, row: int, threads: int
) -> tuple[Function, Function, Function]:
    """Return functions by which `threads` threads copy a panel of float32, of an operand in this order.

    place(t) is (p, i): where thread t's first copy lies in the panel. index(p, i, pitch) is the index of an
    element of the operand. copy(shared, to, source, at, pitch, deep, wide) begins all copies of a thread, the
    first from source[at] to shared[to], with zeros for elements `deep` steps or more behind that, or `wide`
    elements or more beside it. Steps are `row` elements apart in shared memory.

    With unit stride along side, a copy moves 16 bytes. Along p it moves 4, and so transposes the operand:
    `depth` threads read as many steps of one row, a whole sector of 32 bytes if depth is 8. If `row` is 4
    more than a multiple of 32, a warp writes its four rows of 8 steps into 32 banks.
    """
    if order == "rows":
        apart = threads // depth
        copies = side // apart

        def place(t):  # type: ignore[no-untyped-def]
            return int32(t % depth), int32(t // depth)

        def index(p, i, pitch):  # type: ignore[no-untyped-def]
            return int64(i) * pitch + p

        def copy(shared, to, source, at, pitch, deep, wide):  # type: ignore[no-untyped-def]
            reach = wide if deep > 0 else int32(0)
            for e in range(copies):
                valid = 4 if e * apart < reach else 0
                cp_async_4_zfill(shared, to + e * apart, source, at + e * (int64(pitch) * apart), valid)

    else:
        groups = side // 4
        apart = threads // groups
        copies = depth // apart

        def place(t):  # type: ignore[no-untyped-def]
            return int32(t // groups), int32(t % groups * 4)

        def index(p, i, pitch):  # type: ignore[no-untyped-def]
            return int64(p) * pitch + i

        def copy(shared, to, source, at, pitch, deep, wide):  # type: ignore[no-untyped-def]
            for e in range(copies):
                inside = e * apart < deep and wide > 0
                from_there = at + e * (int64(pitch) * apart)
                cp_async_16_or_zeros(shared, to + e * apart * row, source, from_there, inside)

    return inlined(place), inlined(index), inlined(copy)


def stores_vectors(c: Matrix) -> bool:
    """Return whether four neighbours in a row of c can be stored at once."""
    return c.order == "rows" and c.row_stride % 4 == 0 and c.address % 16 == 0


@functools.cache
def store_four(vectors: bool) -> Function:
    """Return store(c, at, stride, sums, e, left): c[at], c[at + stride], ... = sums[e], sums[e + 1], ...

    It stores four, or fewer if only `left` are before the edge. With `vectors` it stores them at once: stride
    is then 1, and c[at] begins on 16 bytes.
    """

    def store(c, at, stride, sums, e, left):  # type: ignore[no-untyped-def]
        if vectors and left >= 4:
            store_128(c, at, sums, e)
        else:
            for further in range(4):
                if further < left:
                    c[at + int64(further) * stride] = sums[e + further]

    return inlined(store)
