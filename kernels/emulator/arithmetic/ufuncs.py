"""NumPy functions that NumPy lacks, compiled by Numba: the fused multiply-add, and flushing to zero.

NumPy's sums and products don't make a * b + c rounded once, or not cheaply: float32 by way of float64 takes
two to five times as long and rounds some sums twice, and float64 takes a dozen operations. Numba, which
compiles the kernels anyway, writes LLVM's `fma`: an instruction of the processor, or the exact function of
the C library. Flushing subnormal numbers, as `.ftz` does with all operands, is one pass here, three in NumPy.

The first function that is compiled takes half a second, most of it Numba's own start, and another less than a
tenth. So each is compiled when the first instruction asks for it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

TYPES = {"f32": "float32", "f64": "float64"}


@functools.cache
def fused_multiply_add(kind: str) -> Any:
    """Return the ufunc of a, b and c of this kind ("f32", "f64"): a * b + c, rounded once."""
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
    return wrapper.ufunc  # NumPy's own: a call takes a third of the time that one of Numba's wrapper takes
