"""The order in which blocks take the tiles of a product, so that blocks at work share rows and columns.

Blocks at work at the same time read the same lines of a and b, so most lines come from the second-level cache
(L2). How many different lines they read depends on the order. In a c with 8192 columns, 128 tiles of 128 x
256 are, row by row, 512 rows of a and all 8192 columns of b. In groups of 16 rows of tiles, down each column
of the group, they are 2048 rows and 2048 columns, less than half. Every other group runs in the opposite
direction, over the columns that were read last.

Source: Tillet, Kung and Cox, Triton (MAPL 2019), and its tutorial on matrix multiplication, "L2 cache
optimizations".
"""

from __future__ import annotations

from typing import Any

from numba import int32

from ..instructions.inline_ptx import AsmOperand, Assembler, Value, instruction
from .panels import inlined


@instruction(returns="int32")
def quotient(to: Assembler, x: AsmOperand, y: AsmOperand) -> Value:
    """quotient(x, y): x // y of numbers from 0 on; Numba's // would call a division of 64 bits."""
    return to.builder.udiv(to.integer(x), to.integer(y))


def grouped(index: Any, rows: Any, columns: Any, group: Any) -> Any:
    """Return (row, column) of tile `index` of rows x columns tiles, in groups of `group` rows.

    Every tile comes once as index runs from 0 to rows * columns - 1. The last group may have fewer rows.
    """
    area = int32(group * columns)
    number = quotient(index, area)
    first = int32(number * group)
    height = int32(min(group, rows - first))
    inside = int32(index - number * area)
    column = quotient(inside, height)
    row = int32(first + inside - column * height)
    if number & 1:
        column = int32(columns - 1 - column)
    return row, column


grouped_tile = inlined(grouped)
