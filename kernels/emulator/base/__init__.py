"""The parts that every instruction is built from: the registry of instructions, batches, and addresses.

A unit (registered with `@unit`) says what one kind of instruction does to a machine. It gets a `Batch` of
like instructions and returns the function that runs them.

| File | Holds |
|---|---|
| instruction_registry | `unit`, which registers an instruction, and how the scheduler may move it |
| instruction_batch | Batch: like instructions run as one NumPy operation; reads and writes their operands |
| addresses | which lanes run; state spaces and generic addresses |
"""
