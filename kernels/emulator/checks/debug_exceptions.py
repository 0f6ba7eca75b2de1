"""Kernels of `cuda.jit(debug=True)`: their exceptions are noticed.

Without `debug` a thread that raises one ends, and nobody knows. With it, Numba has the kernel note the first
in a variable `..._errcode__`, at which its launch looks afterwards; here it is a fault at that line.
"""

from __future__ import annotations

import importlib
import linecache
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ...cuda.runtime.compiler import _assumed_device
from ...cuda.runtime.device import capability, require_compiler

if TYPE_CHECKING:
    from ..execution.machine import Machine

ERROR = "__errcode__"  # how the variable's name ends


def debug_ptx(
    function: Callable[..., None], types: tuple[Any, ...], architecture: str, threads: int, fastmath: bool
) -> str:
    """Return the PTX of a kernel that notes exceptions, not optimised, as Numba asks for with `debug`."""
    require_compiler()
    cuda = importlib.import_module("numba.cuda")
    major, minor, features = capability(architecture)
    with _assumed_device((major, minor)):
        ptx, _ = cuda.compile(
            function,
            types,
            device=False,
            abi="numba",
            cc=(major, minor, features) if features else (major, minor),
            output="ptx",
            launch_bounds=(threads, 1),
            fastmath=fastmath,
            debug=True,
            opt=False,
        )
    return str(ptx)


def raised(machine: Machine, lanes: NDArray[np.bool_]) -> NoReturn:
    """Fault for the exception that is being noted, with the line that raises it."""
    location = machine.instruction.location if machine.instruction is not None else None
    line = linecache.getline(location.file, location.line).strip() if location else ""
    machine.fault("exception", f"the kernel raises an exception{f': {line}' if line else ''}", lanes=lanes)
