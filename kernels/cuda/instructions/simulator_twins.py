"""Python in place of the instructions of `copies.py`, for Numba's CUDA simulator.

The simulator (NUMBA_ENABLE_CUDASIM=1) runs a kernel's Python source: each GPU thread is a Python thread, and
arrays are NumPy's. It can't run PTX, so each copy instruction has a twin here that does the same in Python. A
twin copies at once, so there is nothing to commit or to wait for. That hides a missing wait; the emulator
shows it.
"""

from __future__ import annotations

from typing import Any

SimulatedArray = Any  # NumPy's, or the simulator's wrapper around one


def copy(size: int, into: SimulatedArray, i: int, source: SimulatedArray, j: int) -> None:
    """Copy the elements of `size` bytes."""
    copy_and_fill(size, into, i, source, j, size)


def copy_and_fill(
    size: int, into: SimulatedArray, i: int, source: SimulatedArray, j: int, valid: int
) -> None:
    """Copy the elements of the first `valid` bytes, and write zeros in the rest of `size`."""
    count = valid // into.dtype.itemsize
    for e in range(size // into.dtype.itemsize):
        into[i + e] = source[j + e] if e < count else 0


def copy_16_or_fill(shared: SimulatedArray, i: int, source: SimulatedArray, j: int, inside: bool) -> None:
    """Copy the elements of 16 bytes where `inside` holds, else write zeros."""
    copy_and_fill(16, shared, i, source, j, 16 if inside else 0)


def nothing(*groups: int) -> None:
    """Do nothing to commit or to wait for: the copies are done."""
