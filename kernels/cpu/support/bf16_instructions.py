"""Which instructions for bf16 numbers this CPU has, found by trying them in a child process, once.

Flags do not tell: there are machines that list amx_bf16 and hide the leaves of CPUID that describe tiles, and
Linux gives tiles only to a process that asks. So the child asks, computes a small product with each
instruction, and says which gave the right numbers; one that does not exist ends the child (SIGILL), or keeps
LLVM from compiling. The answer is kept for the CPU, its microcode, Numba, and the target that Numba compiles
for ($NUMBA_CPU_NAME, say). It takes two seconds.

Source: Linux, Documentation/arch/x86/xstate.rst.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import platform
import sys

from ...rung import require_numba
from ...tried_once import child, fault, remembered

AMX, AVX512_BF16 = "AMX", "AVX512_BF16"  # the better first
NONE = "this CPU has no bf16 products"
PROGRAM = (
    f"import sys; sys.path[:] = {{!r}}; from {__package__}.instruction_trial import attempt; attempt(NAME)"
)
LIMIT = 120.0  # seconds of a child, most of which compile
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64


@functools.cache
def matrix_unit() -> str:
    """Return AMX or AVX512_BF16, which this process may use from now on; "" if this CPU has neither.

    Raises RuntimeError where Numba compiles nothing: no trial would be right, and its answer would be kept.
    """
    require_numba()
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ""
    target = tuple(os.environ.get(f"NUMBA_CPU_{name}", "") for name in ("NAME", "FEATURES"))
    found = remembered("matrix-unit", (importlib.metadata.version("numba"), *target), _try) or []
    if AVX512_BF16 not in found:  # packing rounds with an instruction of it, for tiles too
        return ""
    # A process that has little room for its signals' stacks is refused tiles, though its child was not.
    return next((name for name in found if name != AMX or ask_for_tiles()), "")


def require_matrix_unit() -> None:
    """Raise RuntimeError if this CPU has none."""
    if not matrix_unit():
        raise RuntimeError(
            f"{NONE}: s8_matrix_unit needs AMX or AVX512_BF16 (Xeons since 2023, AMD since Zen 4); "
            "take rung s7_threads"
        )


def ask_for_tiles() -> bool:
    """Ask Linux for the tile registers, for this process and its threads; return whether they are granted."""
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0)


def _try() -> list[str] | None:
    """Which of the instructions work; None if that could not be found out now."""
    works = []
    for name in (AMX, AVX512_BF16):
        done = child(PROGRAM.replace("NAME", repr(name)), os.environ, LIMIT)
        if done is None or (done.returncode not in (0, 1) and not fault(done.returncode)):
            return None
        works += [] if done.returncode else [name]
    return works
