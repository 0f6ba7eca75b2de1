"""The CPU ladder: ways to multiply two matrices, each with one idea more than the one before.

A rung's docstring names its idea, why that is faster, and by how much. To add a rung, write its file: the
ladder reads this folder. The table is for readers, and tested. `benchmarks/bench_cpu_matmul.py` times rungs.

| File | The one idea |
|---|---|
| s1_python_loops | the definition: three Python loops |
| s2_vectors | one NumPy operation for a whole row |
| s3_compiled | the loops of s1, compiled by Numba |
| s4_loop_order | the inner loop walks along rows, so the compiler can use SIMD |
| s5_cache_blocks | blocks of b stay in the first cache |
| s6_register_tile | a tile of the result stays in registers |
| s7_threads | all cores share the work |
| s8_matrix_unit | one instruction multiplies pairs of bf16 numbers, or tiles of them |
| attention/ | another ladder, of attention, on the same support |
| support/ | what the upper rungs build on |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..rung import ladder

if TYPE_CHECKING:
    from ..rung import Rung

    CPU_LADDER: tuple[Rung, ...]
    """The rungs on a CPU, in order: from three Python loops to the matrix unit."""

RUNGS, load, __getattr__ = ladder(__name__, "CPU_LADDER")
