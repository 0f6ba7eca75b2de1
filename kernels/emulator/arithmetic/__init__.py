"""The arithmetic of PTX instructions, as functions of NumPy arrays; no registers, no memory, no machine.

`operations.operation(("mad", "lo", "s32"))` returns what an instruction computes, or None.

| File | Holds |
|---|---|
| operations | the table of instructions that compute in registers alone; the others fill it |
| integers, bits | integer arithmetic; logic, shifts, bit fields and byte permutation |
| floats | float32 and float64; float16 and bfloat16 |
| rounding | rounding modes, by the processor; .ftz and .sat; the fused multiply-add, compiled by Numba |
| compare_and_select | setp, selp, testp |
| convert | cvt between all types |
| fragments | where the elements of a matrix tile lie in registers |
"""

from . import bits, compare_and_select, convert, floats, integers  # noqa: F401  (these fill the table)
