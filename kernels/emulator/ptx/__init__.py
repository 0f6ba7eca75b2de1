"""PTX as a program: read the text that NVVM emits, and analyse it before it runs.

Nothing here runs anything. `reader.parse(text)` returns the `Program` that the other packages execute.

| File | Holds |
|---|---|
| fault | EmulatorError and Fault, which all other files raise |
| dtypes | PTX's kinds of values as NumPy dtypes, their sizes |
| program | Program, PtxInstruction and its operands, Variable, Location, DataFlow |
| reader | the text of a module, statement by statement; inlines calls |
| static_analysis | where pointers go and what atomics are for, to avoid false alarms about races |
"""
