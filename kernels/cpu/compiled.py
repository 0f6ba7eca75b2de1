"""Compile a kernel with Numba at its first call, for the dtype at hand, and keep the result on disk.

Importing Numba takes half a second and compiling a kernel about as long, so neither happens until a compiled
rung is used. Machine code goes to `__pycache__` beside the kernel's file, or where that can't be written to
the user's cache folder (the environment variable NUMBA_CACHE_DIR names another); where neither can, each
process compiles afresh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..rung import Array, Compute


def compiled(layouts: str, **options: Any) -> Callable[[Compute], Compute]:
    """Decorate `kernel(a, b, out)`, so that its first call with each dtype compiles it.

    `layouts` has a letter for each of a, b and out, which is a promise to the compiler: "C" for rows that lie
    one after another in memory, element beside element, "A" for any strides. There is one machine code for
    each dtype rather than one for each combination of strides that callers happen to bring. `options` go to
    `numba.njit` (`parallel`, ...).
    """

    def decorate(kernel: Compute) -> Compute:
        @functools.cache
        def machine_code(dtype: str) -> Compute:
            import numba

            types: Any = numba.types
            element = getattr(types, dtype)
            signature = tuple(
                # The inputs are declared read-only: that takes arrays that can be written too.
                types.Array(element, 2, layout, readonly=name != "out")
                for name, layout in zip(("a", "b", "out"), layouts, strict=True)
            )
            try:
                dispatcher = numba.njit(cache=True, **options)(kernel)
            except RuntimeError:  # no folder that can be written
                dispatcher = numba.njit(**options)(kernel)
            dispatcher.compile(signature)
            dispatcher.disable_compile()
            code: Compute = dispatcher
            return code

        @functools.wraps(kernel)
        def call(a: Array, b: Array, out: Array) -> None:
            machine_code(out.dtype.name)(a, b, out)

        return call

    return decorate
