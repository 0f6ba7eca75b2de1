"""Run compiled CUDA kernels without a GPU, and find mistakes that a GPU would not show.

The emulator executes the PTX that NVVM makes of a Numba kernel in NumPy, many threads at once. `launch` runs
a kernel. `profile` also counts what it did: instructions by class, sectors of global memory for each request,
bank conflicts, matrix instructions, bytes moved. A `Fault` names the thread, the line and the mistake.

Each package imports only from the packages above it in this list:

| Package | Holds |
|---|---|
| ptx | the program: reading PTX, and analysing it |
| machine | the state of some blocks: registers, memory, clocks, the history of accesses |
| base | how an instruction is registered, and how it reads its operands |
| arithmetic | what instructions compute |
| synchronization | barriers, mbarriers, clusters, groups of asynchronous operations, atomics' ordering |
| accesses | loads and stores with their checks: **races are found in `accesses/race_faults.py`** |
| instructions | all other instructions |
| execution | the schedule of instructions, lanes and blocks; `run_kernel` |
| launch_and_profile | `launch`, `profile`, and the table of counts |
| mistakes | mistakes planted in the ladder, and a comparison of what it says with a GPU |
"""

from __future__ import annotations

from .launch_and_profile import Profile, launch, profile, profiled
from .ptx.fault import EmulatorError, Fault

__all__ = ["EmulatorError", "Fault", "Profile", "launch", "profile", "profiled"]
