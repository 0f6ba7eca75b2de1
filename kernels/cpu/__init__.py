"""The CPU ladder: eight ways to multiply two matrices, each with one idea more than the one before.

A rung's docstring names its idea, why that is faster, and by how much. To add a rung, write its file; nothing
in the project lists rungs.

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

import importlib
from typing import TYPE_CHECKING, Any

from ..rung import files_of_rungs

if TYPE_CHECKING:
    from ..rung import Rung

    CPU_LADDER: tuple[Rung, ...]
    """The eight rungs on a CPU: from three Python loops to the matrix unit."""

RUNGS = files_of_rungs(__file__)


def __getattr__(name: str) -> Any:
    """Import the rungs when the ladder is first asked for."""
    if name != "CPU_LADDER":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    global CPU_LADDER
    CPU_LADDER = tuple(importlib.import_module(f".{rung}", __name__).RUNG for rung in RUNGS)
    return CPU_LADDER
