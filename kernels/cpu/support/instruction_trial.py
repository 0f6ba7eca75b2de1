"""A product with each instruction for bf16 numbers, for `bf16_instructions.py` to try in a child process."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import njit, types

from ...rung import Array
from . import board, tile_registers
from .bf16_instructions import AMX, AVX512_BF16, ask_for_tiles
from .vector_instructions import Emitter, Value, Vectors, emitted


@emitted(types.void, None, None, None)
def _dot(at: Emitter, a: Value, b: Value, c: Value) -> Any:
    """_dot(a, b, c): add the products of one vector of pairs to one vector of float32."""
    v = Vectors(at.builder, types.uint32)
    x, y, z = (at.builder.bitcast(pointer, v.pointer) for pointer in (a, b, c))
    v.store(v.multiply_add(v.load(x), v.load(y), v.load(z)), z)


@njit
def _vectors(a: Array, b: Array, c: Array) -> None:
    at_a, at_b, at_c = board.address(a), board.address(b), board.address(c)
    for row in range(c.shape[0]):
        start = row * c.strides[0]
        a_row, b_row = board.elements(at_a + start, np.uint32), board.elements(at_b + start, np.uint32)
        _dot(a_row, b_row, board.elements(at_c + start, np.float32))


@njit
def _tiles(a: Array, b: Array, c: Array) -> None:
    stride = c.strides[0]
    tile_registers.begin_tiles()
    tile_registers.load0(board.address(c), stride)
    tile_registers.load4(board.address(a), stride)
    tile_registers.load6(board.address(b), stride)
    tile_registers.add0()
    tile_registers.store0(board.address(c), stride)
    tile_registers.end_tiles()


TRIALS = {AMX: _tiles, AVX512_BF16: _vectors}


def attempt(name: str) -> None:
    """Multiply with this instruction, and exit with 0 if the product is right; else with 1, or die."""
    if name == AMX and not ask_for_tiles():
        sys.exit(1)
    a, b = np.ones((16, 16), np.uint32), np.zeros((16, 16), np.uint32)
    a *= 0x3F80_4000  # the pair (2, 1)
    b[:] = np.arange(1, 17, dtype=np.float32).view(np.uint32) >> 16  # the pairs (1, 0), (2, 0), ...
    c = np.full((16, 16), 0.5, np.float32)
    TRIALS[name](a, b, c)
    sums = 0.5 + 2.0 * np.arange(1, 17) * (16 if name == AMX else 1)
    sys.exit(0 if np.array_equal(c, np.tile(sums.astype(np.float32), (16, 1))) else 1)
