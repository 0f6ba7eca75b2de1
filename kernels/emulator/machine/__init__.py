"""The machine: some blocks of a launch, with their registers, memory, clocks and counts.

This is the state that instructions read and change; it knows no instruction. **Races are found here**: every
access is compared with the last ones to the same bytes, by vector clocks.

| File | Holds |
|---|---|
| machine | Machine: all state of some blocks; faults that name the thread |
| launch | Launch: grid, arguments, and what all machines of a launch share |
| shape | how lanes, warps and blocks are numbered; the register arrays |
| global_memory | the kernel's arrays, at addresses of their own |
| races_in_shared_memory | Clocks: vector clocks of all warps, and the race detector of shared memory |
| races_in_global_memory | History: the race detector of global memory, within and between blocks |
| counts | what `profile` counts: instructions, sectors, bank conflicts |
"""
