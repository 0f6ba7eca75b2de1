"""The machine: some blocks of a launch, with their registers, memory, clocks and counts.

This is the state that instructions read and change; it knows no instruction. To find races
(`accesses/race_faults.py`), it remembers the last accesses to the same bytes, and vector clocks.

| File | Holds |
|---|---|
| machine_state | Launch; Machine: all state of some blocks; faults that name the thread |
| shape | how lanes, warps and blocks are numbered; the register arrays |
| global_memory | the kernel's arrays, at addresses of their own |
| races_in_shared_memory | Clocks: vector clocks of all warps, and the last accesses to shared memory |
| counts | what `profile` counts: instructions, sectors, bank conflicts |
"""
