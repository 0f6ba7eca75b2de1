"""Ladders of matrix multiplications, from three Python loops upwards: one idea a rung, one rung a file.

    from minidist.kernels import CPU_LADDER, rung

    c = rung("s4_loop_order").matmul(a, b)
    for step in CPU_LADDER:
        print(step.number, step.name, step.idea)

To add a rung: write its file (see `cpu/s1_python_loops.py`, the shortest) and name it in the ladder
(`cpu/__init__.py`). Tests, benchmarks and `Linear` go over the ladder, so they take it from there.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from .cpu import CPU_LADDER
from .rung import Rung

__all__ = ["CPU_LADDER", "Rung", "rung"]


# Named like the module that Rung comes from, which imports still find.
def rung(name_or_number: str | int, ladder: Sequence[Rung] = CPU_LADDER) -> Rung:
    """Return the rung of `ladder` that has this name ("s4_loop_order"), short name ("s4") or number (4).

    Raises ValueError, with the nearest name, where there is none.
    """
    asked = str(name_or_number)
    for candidate in ladder:
        if asked in (candidate.name, f"s{candidate.number}", str(candidate.number)):
            return candidate
    names = [candidate.name for candidate in ladder]
    nearest = difflib.get_close_matches(asked, names, n=1, cutoff=0.3)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ValueError(f"unknown rung {asked!r}: {hint}the ladder is {', '.join(names)}")
