"""Compile a kernel with Numba at its first call, for the dtype at hand, and keep the result on disk.

Importing Numba takes half a second and compiling a kernel about as long, so neither happens until a compiled
rung is used. Machine code goes to `__pycache__` beside the kernel's file, or where that can't be written to
the user's cache folder (the environment variable NUMBA_CACHE_DIR names another); where neither can, each
process compiles afresh.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import zlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

KernelFunction = TypeVar("KernelFunction", bound=Callable[..., None])


def compiled(
    layouts: str, *, uses: tuple[str, ...] = (), **options: Any
) -> Callable[[KernelFunction], KernelFunction]:
    """Decorate `kernel(a, b, out, ...)`, so that its first call with each dtype compiles it.

    `layouts` has a letter for each array that the kernel takes, all of one dtype: "C" is a promise to the
    compiler that rows lie one after another in memory, element beside element, "A" stands for any strides.
    There is one machine code for each dtype rather than one for each combination of strides that callers
    happen to bring. What the kernel takes after its arrays are integers. `uses` names modules beside this one
    whose compiled functions it calls: they import Numba, so they are imported when it is compiled. `options`
    go to `numba.njit` (`nogil`, ...).
    """

    def decorate(kernel: KernelFunction) -> KernelFunction:
        parameters = list(inspect.signature(kernel).parameters)
        machine_codes: dict[
            str, KernelFunction
        ] = {}  # by the dtype's character: its name takes NumPy a microsecond

        def machine_code_for(dtype: Any) -> KernelFunction:
            import numba

            types: Any = numba.types
            for module in uses:
                kernel.__globals__[module] = importlib.import_module(f"{__package__}.{module}")
            element = getattr(types, dtype.name)
            arrays = [
                # The inputs are declared read-only: that takes arrays that can be written too.
                types.Array(element, 2, layout, readonly=name in ("a", "b"))
                for name, layout in zip(parameters, layouts, strict=False)
            ]
            integers = [types.intp] * (len(parameters) - len(layouts))
            # Numba compiles afresh where the kernel's own file has changed, but looks at none of the files
            # that it uses. The name under which the machine code is kept does.
            named = FunctionType(kernel.__code__, kernel.__globals__, kernel.__name__)
            named.__qualname__ = f"{kernel.__qualname__}_{_checksum():08x}"
            try:
                dispatcher = numba.njit(cache=True, **options)(named)
            except RuntimeError:  # no folder that can be written
                dispatcher = numba.njit(**options)(named)
            dispatcher.compile((*arrays, *integers))
            dispatcher.disable_compile()
            machine_codes[dtype.char] = dispatcher
            return machine_codes[dtype.char]

        @functools.wraps(kernel)
        def call(a: Any, b: Any, out: Any, *more: Any) -> None:
            machine_code = machine_codes.get(out.dtype.char) or machine_code_for(out.dtype)
            machine_code(a, b, out, *more)

        return call  # type: ignore[return-value]

    return decorate


@functools.cache
def _checksum() -> int:
    """A number that changes with any file of `kernels/cpu`."""
    files = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return zlib.crc32(b"".join(file.read_bytes() for file in files))
