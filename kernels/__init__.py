"""Ladders of matrix multiplications, from three Python loops to a GPU's tensor cores, and two of attention.

Each rung is one file, complete in itself, and adds one idea to the rung before it. Around the ladders stand
the tools that check them, time them and run CUDA kernels on a machine without a GPU.

    from minidist.kernels import ATTENTION_LADDER, CPU_LADDER, CUDA_LADDER, rung

    c = rung("s4_loop_order").matmul(a, b)
    for step in CPU_LADDER:
        print(step.number, step.name, step.idea)
    out = ATTENTION_LADDER[-1].attention(q, k, v, causal=True)

| File or folder | Holds |
|---|---|
| rung.py, attention_rung.py | what a rung is, and the checks that all rungs share |
| torch_tensors.py | torch tensors as operands of the rungs that take them |
| tried_once.py | what this CPU can do, found by trying in a child process; starts processes, writes files |
| cache_folder.py | the user's folder for measured peaks and compiled kernels; writes files there |
| cpu/ | the CPU ladder, s1 to s8; in attention/ that of attention, s1 to s7 |
| cuda/ | the CUDA ladder, s1 to s10; in attention/ that of attention, s1 to s5 |
| emulator/ | runs compiled CUDA kernels (PTX) without a GPU |
| tpu/ | a systolic array cycle by cycle, and a model of tensor cores |
| measure/ | correctness checks, timers, this machine's peaks, the roofline |
| roofline.py, systolic.py | only public import paths of `measure/roofline.py` and `tpu/` |

A ladder imports its rungs when it is first asked for, and one for CUDA Numba too. To add a rung, write its
file; tests, benchmarks and `Linear` go over the ladders.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from . import cpu, cuda
from .rung import Rung, Step, StepT

if TYPE_CHECKING:
    from .attention_rung import AttentionRung
    from .cpu import CPU_LADDER as CPU_LADDER
    from .cuda.attention import CUDA_ATTENTION_LADDER as CUDA_ATTENTION_LADDER
    from .cuda.cuda_rung import CudaRung

    CUDA_LADDER: tuple[CudaRung, ...]
    """The ten rungs on a GPU, or in the emulator: from a thread for each element to Hopper's instructions."""
    ATTENTION_LADDER: tuple[AttentionRung, ...]
    """The seven rungs of attention on a CPU: from the definition to a backward pass on all cores."""

__all__ = ["ATTENTION_LADDER", "CPU_LADDER", "CUDA_ATTENTION_LADDER", "CUDA_LADDER", "Rung", "rung"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = ".cuda" if name.startswith("CUDA") else ".cpu"
    package += ".attention" if "ATTENTION" in name else ""
    return getattr(importlib.import_module(package, __name__), name)


# The function hides the module of the same name here; `from minidist.kernels.rung import ...` still works.
@overload
def rung(name_or_number: str | int, ladder: None = None) -> Rung: ...
@overload
def rung(name_or_number: str | int, ladder: Sequence[StepT]) -> StepT: ...
def rung(name_or_number: str | int, ladder: Sequence[Step] | None = None) -> Step:
    """Return the rung of `ladder` with this name ("s4_loop_order"), short name ("s4") or number (4).

    Without a ladder, short names and numbers mean the CPU ladder, and full names ("s9_tensor_core") either.
    Raises ValueError, with the nearest name, if there is no such rung, and ImportError for a CUDA rung if
    numba-cuda is not installed.
    """
    asked = str(name_or_number)
    steps = cpu.CPU_LADDER if ladder is None else ladder
    for candidate in steps:
        if asked in (candidate.name, f"s{candidate.number}", str(candidate.number)):
            return candidate
    if ladder is None and asked in cuda.RUNGS:
        step: Step = cuda.load(asked)
        return step
    names = [candidate.name for candidate in steps]
    known = names if ladder is not None else [*names, *cuda.RUNGS]
    nearest = difflib.get_close_matches(asked, known, n=1, cutoff=0.3)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ValueError(f"unknown rung {asked!r}: {hint}the ladder is {', '.join(names)}")
