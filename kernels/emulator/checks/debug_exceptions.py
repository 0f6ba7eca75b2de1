"""Exceptions in kernels of `cuda.jit(debug=True)`.

Without `debug`, a thread that raises an exception just ends. With it, Numba makes the kernel store the first
one in a variable `..._errcode__`, which its launch reads afterwards. The emulator faults at that store.
"""

from __future__ import annotations

import linecache
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from ..machine.machine import Machine

ERROR = "__errcode__"  # the end of the variable's name


def fault_for_exception(machine: Machine, lanes: NDArray[np.bool_]) -> NoReturn:
    """Fault for the exception that is being stored, with the line that raises it."""
    location = machine.instruction.location if machine.instruction is not None else None
    line = linecache.getline(location.file, location.line).strip() if location else ""
    machine.fault("exception", f"the kernel raises an exception{f': {line}' if line else ''}", lanes=lanes)
