"""The CUDA ladder in Numba: ten kernels, each with one idea more than the one before.

The same source runs on a GPU, and in an emulator if there is none. To add a rung, write its file: the ladder
reads this folder. The table is for readers, and tested. `benchmarks/bench_cuda.py` times rungs.

| File or folder | Holds |
|---|---|
| s1_naive | one thread for each element of c |
| s2_coalesced | neighbouring threads read neighbouring elements |
| s3_shared_tile | tiles of a and b in shared memory |
| s4_thread_tile_1d | eight elements of a column per thread |
| s5_thread_tile_2d | 8 x 8 elements per thread |
| s6_vector_loads | loads and stores of 16 bytes |
| s7_async_copy | copies that run while the block multiplies |
| s8_warp_tile | square warp tiles, loaded a step ahead |
| s9_tensor_core | tensor cores |
| s10_hopper | the copy engine and the matrix instructions of Hopper |
| cuda_rung.py | what a CUDA rung is: checks, and copies to a GPU and back |
| tiling/ | tiles in shared memory and registers |
| runtime/ | compiling and launching kernels, and a GPU's memory |
| instructions/ | PTX instructions as functions |
| warp.py, emulator.py | only public import paths of `instructions/` and `kernels/emulator` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy

from ..rung import ladder

# NumPy 2.5 has it no more, and numba-cuda 0.30 asks for it as it is imported.
vars(numpy).setdefault("row_stack", numpy.vstack)

if TYPE_CHECKING:
    from .cuda_rung import CudaRung

    CUDA_LADDER: tuple[CudaRung, ...]

RUNGS, load, __getattr__ = ladder(__name__, "CUDA_LADDER", cuda=True)
