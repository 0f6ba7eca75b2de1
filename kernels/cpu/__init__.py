"""The CPU's ladder: each file changes one thing, and says why it is faster and by how much.

To add a rung, write its file and name it here, in both lines; nothing else in the project lists rungs.
"""

from __future__ import annotations

from ..rung import Rung
from . import (
    s1_python_loops,
    s2_vectors,
    s3_compiled,
    s4_loop_order,
    s5_cache_blocks,
    s6_register_tile,
    s7_threads,
)

CPU_LADDER: tuple[Rung, ...] = tuple(
    step.RUNG
    for step in (
        s1_python_loops,
        s2_vectors,
        s3_compiled,
        s4_loop_order,
        s5_cache_blocks,
        s6_register_tile,
        s7_threads,
    )
)
