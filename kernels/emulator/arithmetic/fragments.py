"""Where the elements of a matrix tile lie in the registers of a warp.

A tensor-core instruction takes its tiles from the registers of 32 lanes. The PTX manual gives each layout as
formulas in g = lane >> 2 ("groupID"), t = lane & 3 ("threadID_in_group") and the element's number in the lane
(PTX ISA, section "Matrix Fragments for mma.m16n8k16" and its neighbours). All of them permute digits: the
lane has the digits g t, the element a few more, and row and column have the same digits in another order. So
a layout here is four words, one letter a digit, most significant first. Reading a tile is a transposition of
axes, without an index array. Arrays are (registers, ..., lanes), with the lanes of all warps.

The letters and their sizes: g (8) and t (4) make the lane; w (4) is the warp in its group; n counts groups of
8 columns; k, r, e (2) are digits of the element: the half of the depth, of the rows, of a register.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from ..ptx.dtypes import Array

_SIZES = {"g": 8, "t": 4, "w": 4, "k": 2, "r": 2, "e": 2}


@dataclass(frozen=True)
class Fragment:
    """How a tile lies in registers: the digits of the element, the row, the column and the lane."""

    elements: str  # the digits of an element's number in its lane
    rows: str
    columns: str
    lanes: str = "gt"
    n: int = 1  # the size of digit n

    def tile(self, values: Array) -> Array:
        """Return tiles (..., warps, rows, columns) from the lanes' values (elements, ..., lanes)."""
        _, *lead, lanes = values.shape
        warps = lanes // self.size
        digits = values.reshape(*self._shape(self.elements), *lead, warps, *self._shape(self.lanes))
        return digits.transpose(self._order(len(lead))).reshape(*lead, warps, *self.shape)

    def spread(self, tiles: Array) -> Array:
        """Return the lanes' values (elements, ..., lanes) from tiles (..., warps, rows, columns)."""
        *lead, warps = tiles.shape[:-2]
        digits = tiles.reshape(*lead, warps, *self._shape(self.rows + self.columns))
        back = np.argsort(self._order(len(lead)))
        held: Array = digits.transpose(back)
        return held.reshape(math.prod(self._shape(self.elements)), *lead, warps * self.size)

    @functools.cached_property
    def shape(self) -> tuple[int, int]:
        """The rows and columns of the tile."""
        return math.prod(self._shape(self.rows)), math.prod(self._shape(self.columns))

    @functools.cached_property
    def size(self) -> int:
        """The number of lanes that hold a tile: a warp's, or a warp group's."""
        return math.prod(self._shape(self.lanes))

    def _shape(self, digits: str) -> tuple[int, ...]:
        return tuple(self.n if digit == "n" else _SIZES[digit] for digit in digits)

    def _order(self, leading: int) -> tuple[int, ...]:
        """Return the axes of the lanes' values (elements, leading, warps, lanes) in the order of tiles."""
        first = len(self.elements)
        after = first + leading + 1
        axes = {digit: i for i, digit in enumerate(self.elements)}
        axes |= {digit: after + i for i, digit in enumerate(self.lanes)}
        return (*range(first, after), *(axes[digit] for digit in self.rows + self.columns))


@dataclass(frozen=True)
class Fragments:
    """The layouts of one shape of mma.sync: a (m, k), b (k, n), c and d (m, n)."""

    a: Fragment
    b: Fragment
    c: Fragment


_SUMS = Fragment("re", "rg", "te")  # c and d of every m16n8 shape

# mma.sync by shape and by the bits of an element of a and b.
MMA = {
    ("m16n8k16", 16): Fragments(Fragment("kre", "rg", "kte"), Fragment("ke", "kte", "g"), _SUMS),
    ("m16n8k8", 32): Fragments(Fragment("kr", "rg", "kt"), Fragment("k", "kt", "g"), _SUMS),
}

# An 8 x 8 matrix of 16-bit elements as ldmatrix and stmatrix hold it, and its transpose (.trans).
MATRIX, MATRIX_TRANSPOSED = Fragment("e", "g", "te"), Fragment("e", "te", "g")


@functools.cache
def wgmma_sums(n: int) -> Fragment:
    """Return the layout of wgmma's accumulators, (64, n), in 128 lanes of n / 2 elements."""
    return Fragment("nre", "wrg", "nte", "wgt", n // 8)


def load_matrices(rows: Array, transposed: bool) -> Array:
    """Return registers (count, ..., lanes) uint32 as ldmatrix loads rows (..., warps, count, 8, 8) uint16.

    rows[..., i, j, :] are the 16 bytes at the address from lane 8 i + j. A register holds two elements, the
    first in its low half (PTX ISA, ldmatrix).
    """
    pairs = (MATRIX_TRANSPOSED if transposed else MATRIX).spread(np.moveaxis(rows, -3, 0)).astype(np.uint32)
    return pairs[0] | pairs[1] << np.uint32(16)


def store_matrices(registers: Array, transposed: bool) -> Array:
    """Return rows (..., warps, count, 8, 8) uint16 as stmatrix stores them: `load_matrices` inverted."""
    pairs = np.stack([registers & np.uint32(0xFFFF), registers >> np.uint32(16)]).astype(np.uint16)
    return np.moveaxis((MATRIX_TRANSPOSED if transposed else MATRIX).tile(pairs), 0, -3)
