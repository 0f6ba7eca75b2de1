"""PTX as a program: read the text that NVVM emits, and analyse it before it runs.

Nothing here runs anything. `reader.parse(text)` returns the `Program` that the other packages execute.

| File | Holds |
|---|---|
| fault | EmulatorError and Fault, which all other files raise |
| dtypes | PTX's kinds of values as NumPy dtypes, their sizes |
| operands | registers, constants, addresses and other operands |
| program | Program, PtxInstruction, Variable, Location, DataFlow |
| reader | the text of a module: functions and variables |
| body | the statements of a function; inlines calls |
| static_analysis | where pointers go and what atomics are for, to avoid false alarms about races |
"""
