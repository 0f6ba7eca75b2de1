"""Which element of a tile a thread holds in which register, as the PTX manual's formulas have it.

Each formula takes the lane, or the thread of a warp group, and the number of the element there, and returns
the element's row and column.
"""

import numpy as np

LANES = range(32)


def a_16x16(lane, i):
    return lane // 4 + (8 if i in (2, 3, 6, 7) else 0), (lane % 4) * 2 + (i & 1) + (8 if i >= 4 else 0)


def b_16x8(lane, i):
    return (lane % 4) * 2 + (i & 1) + (8 if i >= 2 else 0), lane // 4


def c_16x8(lane, i):
    return lane // 4 + (8 if i >= 2 else 0), (lane % 4) * 2 + (i & 1)


def a_16x8_tf32(lane, i):
    return lane // 4 + (8 if i in (1, 3) else 0), lane % 4 + (4 if i >= 2 else 0)


def b_8x8_tf32(lane, i):
    return lane % 4 + (4 if i == 1 else 0), lane // 4


def d_64xn(thread, i):
    warp, lane = divmod(thread, 32)
    return 16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2


def registers_of(tile, place, elements, lanes=LANES):
    """What the lanes hold of a tile (rows, columns), by a formula: (elements, lanes)."""
    return np.array([[tile[place(lane, i)] for lane in lanes] for i in range(elements)])


def bits_of(values, dtype):
    """The bits of float32 values that a format holds exactly: uint16 of f16 and bf16, uint32 of tf32."""
    values = np.asarray(values, np.float32)
    if dtype == "f16":
        return values.astype(np.float16).view(np.uint16)
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.view(np.uint32)


def words_of(elements, dtype):
    """Elements (n, lanes) as 32-bit registers: of 16-bit formats two to a word, the first in its low half."""
    bits = bits_of(elements, dtype).astype(np.uint32)
    return bits if dtype == "tf32" else bits[0::2] | bits[1::2] << 16
