"""The tile registers of AMX: eight of them, each 16 rows of 64 bytes, and the loop that multiplies tiles.

A tile of bf16 numbers is 16 x 32. TDPBF16PS multiplies it by one of 32 x 16, whose rows hold pairs of rows of
b, and adds to a 16 x 16 tile of float32: 16,384 operations in 16 cycles. A result can be added to again after
52 cycles. So four tiles of out are under way, two by two: then a tile that is loaded is used twice, and four
loads of 8 cycles each hide behind four products. Two tiles hold a, two hold b. A panel of b, 128 KiB, is
larger than the first cache: `bf16_product.py` says in which order panels and rows of a come from the second.

`kernels/tpu/tiles.py` models all of it in NumPy. The instructions here are functions in LLVM's language, of
addresses and bytes.

Source: Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter 20.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from .vector_instructions import BYTES, VOID, Emitter, Value, call, emitted

SIDE = 16  # rows of a tile, and words in a row
ROWS = 2 * SIDE  # of out in the loop
NEAR = 4 * SIDE  # words of depth of which all parts are multiplied, while they are in the first cache
WIDTH = 4 * 2 * SIDE  # bytes from row to row of packed b
BYTE = ir.IntType(8)


def configuration(rows: int = SIDE) -> bytes:
    """Return what configures eight tiles of so many rows of 64 bytes: palette 1, bytes a row, rows."""
    return bytes([1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [rows] * 8 + [0] * 8)


def _on_tiles(name: str, *tiles: int) -> Any:
    """An instruction on tiles alone."""

    @emitted(types.void)
    def instruction(at: Emitter) -> None:
        call(at.builder, f"x86.{name}", VOID, [ir.Constant(BYTE, tile) for tile in tiles])

    return instruction


def _on_memory(name: str, tile: int) -> Any:
    """An instruction between a tile and memory: its address, and the bytes from row to row."""

    @emitted(types.void, types.intp, types.intp)
    def instruction(at: Emitter, address: Value, stride: Value) -> None:
        there = at.builder.inttoptr(address, BYTES)
        call(at.builder, f"x86.{name}", VOID, [ir.Constant(BYTE, tile), there, stride])

    return instruction


@emitted(types.void)
def begin_tiles(at: Emitter) -> None:
    """Configure this thread's tiles."""
    kept = configuration()
    data = ir.Constant(ir.ArrayType(BYTE, len(kept)), bytearray(kept))
    there = at.builder.bitcast(cgutils.global_constant(at.builder, "tiles", data), BYTES)
    call(at.builder, "x86.ldtilecfg", VOID, [there])


# Linux saves 8 KiB more for a thread between these two: whoever begins also ends.
end_tiles = _on_tiles("tilerelease")
zero0, zero1, zero2, zero3 = (_on_tiles("tilezero", tile) for tile in range(4))
load0, load1, load2, load3, load4, load5, load6, load7 = (
    _on_memory("tileloadd64", tile) for tile in range(8)
)
store0, store1, store2, store3 = (_on_memory("tilestored64", tile) for tile in range(4))
add0, add1, add2, add3 = (
    _on_tiles("tdpbf16ps", *tiles) for tiles in ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7))
)


@njit(boundscheck=False)
def add_products(
    shape: Any, parts: int, a: int, a_part: int, b: int, b_part: int, c: int, c_pitch: int, add: int
) -> None:
    """c = a b for four tiles of c, or c += a b: the products of `parts` parts of a and b, the least first.

    a, b and c are addresses; shape is (rows, depth in words, words from a row of a to the next), and all 32
    rows are read and written. a_part and b_part are words from a part to the next, c_pitch from a row to the
    next.
    """
    right, stride = c + 4 * SIDE, 4 * c_pitch
    down, pitch = SIDE * stride, 4 * shape[2]
    if add:
        load0(c, stride)
        load1(right, stride)
        load2(c + down, stride)
        load3(right + down, stride)
    else:
        zero0()
        zero1()
        zero2()
        zero3()
    for first in range(0, shape[1], NEAR):
        last = min(first + NEAR, shape[1])
        for level in range(parts - 1, -1, -1):
            for x in range(level + 1):
                for p in range(first, last, SIDE):
                    a_tile = a + 4 * (x * a_part + p)
                    b_tile = b + 4 * (level - x) * b_part + WIDTH * p
                    load4(a_tile, pitch)
                    load6(b_tile, WIDTH)
                    add0()
                    load7(b_tile + 4 * SIDE, WIDTH)
                    add1()
                    load5(a_tile + SIDE * pitch, pitch)
                    add2()
                    add3()
    store0(c, stride)
    store1(right, stride)
    store2(c + down, stride)
    store3(right + down, stride)
