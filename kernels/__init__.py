"""Ladders of matrix multiplications, from three Python loops upwards: one idea a rung, one rung a file.

    from minidist.kernels import CPU_LADDER, CUDA_LADDER, rung

    c = rung("s4_loop_order").matmul(a, b)
    for step in CPU_LADDER:
        print(step.number, step.name, step.idea)

`CUDA_LADDER` runs in an emulator where there is no GPU. It imports Numba, when it is first asked for.

To add a rung: write its file (see `cpu/s1_python_loops.py`, the shortest) and name it in the ladder
(`cpu/__init__.py`, `cuda/__init__.py`). Tests, benchmarks and `Linear` go over the ladder, so they take it
from there.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import cuda
from .cpu import CPU_LADDER
from .rung import Rung

if TYPE_CHECKING:
    from .cuda.rung import CudaRung

    CUDA_LADDER: tuple[CudaRung, ...]

__all__ = ["CPU_LADDER", "CUDA_LADDER", "Rung", "rung"]


def __getattr__(name: str) -> Any:
    if name == "CUDA_LADDER":
        return cuda.CUDA_LADDER
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Named like the module that Rung comes from, which imports still find.
def rung(name_or_number: str | int, ladder: Sequence[Rung] | None = None) -> Rung:
    """Return the rung of `ladder` that has this name ("s4_loop_order"), short name ("s4") or number (4).

    Without a ladder, short names and numbers are the CPU's, and full names ("s9_tensor_core") are those of
    either ladder. Raises ValueError, with the nearest name, where there is none, and ImportError for a CUDA
    rung where numba-cuda is not installed.
    """
    asked = str(name_or_number)
    steps = CPU_LADDER if ladder is None else ladder
    for candidate in steps:
        if asked in (candidate.name, f"s{candidate.number}", str(candidate.number)):
            return candidate
    if ladder is None and asked in cuda.RUNGS:
        return cuda.load(asked)
    names = [candidate.name for candidate in steps]
    known = names if ladder is not None else [*names, *cuda.RUNGS]
    nearest = difflib.get_close_matches(asked, known, n=1, cutoff=0.3)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ValueError(f"unknown rung {asked!r}: {hint}the ladder is {', '.join(names)}")
