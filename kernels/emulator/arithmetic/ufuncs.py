"""Functions that NumPy lacks, compiled by Numba: the fused multiply-add, and flushing subnormals to zero.

NumPy has no cheap a * b + c that rounds once. For float32, a detour through float64 takes two to five times
as long and rounds some sums twice; for float64 it takes a dozen operations. Numba, which compiles the kernels
anyway, emits LLVM's `fma`: a processor instruction, or the exact function of the C library. Flushing, which
`.ftz` does with all operands, takes one pass here and three in NumPy.

Compiling the first function takes half a second, mostly Numba's start, and another less than a tenth. So each
is compiled when an instruction first needs it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

TYPES = {"f32": "float32", "f64": "float64"}


@functools.cache
def fused_multiply_add(kind: str) -> Any:
    """Return the ufunc a * b + c of this kind ("f32", "f64"), rounded once."""
    from numba.extending import intrinsic

    @intrinsic
    def fma(context: Any, a: Any, b: Any, c: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.fma(*arguments)

        return a(a, b, c), generate

    return _compiled(lambda a, b, c: fma(a, b, c), TYPES[kind], 3)


@functools.cache
def flush() -> Any:
    """Return the ufunc that replaces subnormal float32 numbers by zeros of their sign."""
    smallest, zero = np.finfo(np.float32).smallest_normal, np.float32(0)
    return _compiled(lambda x: x * zero if abs(x) < smallest else x, TYPES["f32"], 1)


def _compiled(function: Any, dtype: str, operands: int) -> Any:
    from numba import vectorize

    wrapper = vectorize([f"{dtype}({', '.join([dtype] * operands)})"])(function)
    return wrapper.ufunc  # a call of Numba's wrapper takes three times as long
