"""Compile a kernel with Numba at its first call for a dtype, and keep the machine code on disk.

Importing Numba takes half a second and compiling a kernel about as long, so neither happens before a compiled
rung is used. Machine code goes to `__pycache__` beside the kernel's file, or to the user's cache folder if
that can't be written (NUMBA_CACHE_DIR names another); if neither can be written, each process compiles again.
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

from ...rung import require_numba

KernelFunction = TypeVar("KernelFunction", bound=Callable[..., Any])


def compiled(
    layouts: str, *, uses: tuple[str, ...] = (), variant: Callable[[], str] | None = None, **options: Any
) -> Callable[[KernelFunction], KernelFunction]:
    """Decorate `kernel(array, ...)`, so that its first call with each dtype compiles it.

    `layouts` has one letter for each array, all of one dtype: "C" promises the compiler that rows are
    contiguous and follow each other, "A" stands for any strides. So there is one machine code for each
    dtype, whatever strides callers bring. Parameters after the arrays are integers. `uses` names modules of
    this folder (with a dot: of `kernels/cpu`) whose compiled functions the kernel calls; they import Numba,
    so they are imported when the kernel is compiled. `variant` names what else the machine code depends on:
    Numba keeps it apart for each CPU and its features, but not for what this machine lets a program use.
    `options` go to `numba.njit` (`nogil`, ...).
    """

    def decorate(kernel: KernelFunction) -> KernelFunction:
        parameters = list(inspect.signature(kernel).parameters)
        # By the dtype's character: its name takes NumPy a microsecond.
        machine_codes: dict[str, KernelFunction] = {}

        def machine_code_for(dtype: Any) -> KernelFunction:
            require_numba()
            import numba

            types: Any = numba.types
            for module in uses:
                kernel.__globals__[module.rpartition(".")[2]] = importlib.import_module(
                    f".{module}", __package__
                )
            element = getattr(types, dtype.name)
            arrays = [
                # Declared read-only, the inputs may be read-only or writable.
                types.Array(element, 2, layout, readonly=name in ("a", "b", "q", "k", "v"))
                for name, layout in zip(parameters, layouts, strict=False)
            ]
            integers = [types.intp] * (len(parameters) - len(layouts))
            # Numba notices a change of the kernel's own file, but not of the files that it uses. So the name
            # under which the machine code is kept holds a checksum of all of them.
            named = FunctionType(kernel.__code__, kernel.__globals__, kernel.__name__)
            named.__qualname__ = f"{kernel.__qualname__}_{_checksum():08x}"
            if variant is not None:
                named.__qualname__ += f"_{variant()}"
            try:
                dispatcher = numba.njit(cache=True, **options)(named)
            except RuntimeError:  # no folder is writable
                dispatcher = numba.njit(**options)(named)
            dispatcher.compile((*arrays, *integers))
            dispatcher.disable_compile()
            machine_codes[dtype.char] = dispatcher
            return machine_codes[dtype.char]

        @functools.wraps(kernel)
        def call(array: Any, *more: Any) -> Any:
            machine_code = machine_codes.get(array.dtype.char) or machine_code_for(array.dtype)
            return machine_code(array, *more)

        return call  # type: ignore[return-value]

    return decorate


@functools.cache
def _checksum() -> int:
    """Return a number that changes with any file of `kernels/cpu`."""
    files = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return zlib.crc32(b"".join(file.read_bytes() for file in files))
