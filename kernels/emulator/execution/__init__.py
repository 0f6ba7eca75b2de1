"""Run a kernel: from PTX and arguments to the end of the last thread.

`run_grid.run_kernel` is the entry point. It compiles the program to steps (`schedule`), cuts the grid into
machines, and runs the lanes of each (`lane_scheduler`).

| File | Holds |
|---|---|
| run_grid | run_kernel: checks the launch, loads variables, runs the grid |
| kernel_arguments | Python arguments as the bytes of the kernel's parameters |
| schedule | basic blocks, and batches of independent instructions |
| lane_scheduler | which lanes run next, how lanes wait, deadlocks and livelocks |
"""
