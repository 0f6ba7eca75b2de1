"""Run compiled CUDA kernels without a GPU, and find what a GPU would not forgive.

The PTX that NVVM makes of a Numba kernel is executed in NumPy, many threads at once. `launch` runs a kernel
of yours, `profile` also says what it did: instructions by class, sectors of global memory for each request,
bank conflicts, matrix instructions, bytes moved.
"""

from __future__ import annotations

from .ptx.fault import EmulatorError, Fault
from .report.launch import launch, profile, profiled
from .report.profile_table import Profile

__all__ = ["EmulatorError", "Fault", "Profile", "launch", "profile", "profiled"]
