"""The vector unit of this machine's CPU, as Numba compiles for it.

A vector instruction (SIMD: single instruction, multiple data) handles a register full of numbers at once. The
width and the number of the registers decide the shape of a register tile.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike


@dataclass(frozen=True)
class VectorUnit:
    """The vector unit of one core: the name of its vector instructions, and its registers."""

    name: str
    register_bytes: int
    registers: int
    # Rows of a register tile: the most for which LLVM keeps all sums, two vectors a row, in registers while
    # it also loads the factors.
    tile_rows: int
    fused: bool  # multiplies and adds in one instruction; otherwise it rounds the product in between

    def lanes(self, dtype: DTypeLike) -> int:
        """Return how many elements of `dtype` a register holds."""
        return self.register_bytes // np.dtype(dtype).itemsize


AVX512 = VectorUnit("AVX-512", register_bytes=64, registers=32, tile_rows=14, fused=True)
AVX2 = VectorUnit("AVX2", register_bytes=32, registers=16, tile_rows=6, fused=True)
NEON = VectorUnit("NEON", register_bytes=16, registers=32, tile_rows=12, fused=True)
SSE = VectorUnit("SSE", register_bytes=16, registers=16, tile_rows=6, fused=False)


@functools.cache
def vector_unit() -> VectorUnit:
    """Return the host's widest vector unit, or that of $NUMBA_CPU_NAME and $NUMBA_CPU_FEATURES if set."""
    from numba.core.registry import cpu_target

    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return choose(triple, features)


def choose(triple: str, features: str) -> VectorUnit:
    """Return the unit that LLVM describes as, say, "x86_64-unknown-linux-gnu", "+avx2,+fma,..."."""
    if triple.startswith(("aarch64", "arm64")):
        return NEON
    present = features.split(",")
    if "+avx512f" in present:
        return AVX512
    return AVX2 if "+avx2" in present and "+fma" in present else SSE
