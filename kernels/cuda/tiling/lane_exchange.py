"""The largest and the sum of what the lanes of a warp hold, exchanged by shuffles.

In a step each lane gets the value of the lane whose number differs in one bit, and adds it to its own. After
five steps, one for each bit, all 32 lanes hold the sum of all (a butterfly). With fewer steps groups of 2, 4,
8 or 16 neighbours do so for themselves.

Source: CUDA C++ Programming Guide, "Warp Shuffle Functions", "Reduction across a warp".
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda

from .panels import inlined

ALL = 0xFFFFFFFF  # lanes take part


@functools.cache
def lane_exchange(lanes: int) -> tuple[Any, Any]:
    """Return device functions largest(x) and summed(x), over groups of 2, 4, ... 32 neighbouring lanes."""
    bits = tuple(1 << bit for bit in range(lanes.bit_length() - 1))

    def largest(x):  # type: ignore[no-untyped-def]
        for bit in bits:
            x = max(x, cuda.shfl_xor_sync(ALL, x, bit))
        return x

    def summed(x):  # type: ignore[no-untyped-def]
        for bit in bits:
            x += cuda.shfl_xor_sync(ALL, x, bit)
        return x

    return inlined(largest), inlined(summed)
