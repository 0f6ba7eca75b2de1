"""The instructions: what each does to a machine, wired to its operands.

`execution/run_grid.py` registers them. Loads and stores are in accesses/, barriers in synchronization/,
copies in copies/

| File | Holds |
|---|---|
| arithmetic | instructions of registers alone; what they compute is in the package `arithmetic` |
| atomics | atom and red |
| warps | shuffles, votes, matches |
| mma | mma.sync, and ldmatrix and stmatrix |
| emulated_wgmma | matrix instructions of four warps |
| register_pool | setmaxnreg |
| linked_functions | calls of CUDA's functions on float16 and bfloat16, print, array.reshape |
"""
