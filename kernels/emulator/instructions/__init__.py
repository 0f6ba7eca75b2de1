"""The instructions: what each does to a machine, wired to its operands.

`execution/run_grid.py` registers them. Loads and stores are in accesses/, barriers in synchronization/.

Asynchronous operations are carried out as late as the kernel allows, so a kernel that does not wait reads old
data.

| File | Holds |
|---|---|
| arithmetic | instructions of registers alone; what they compute is in the package `arithmetic` |
| atomics | atom and red |
| warps | shuffles, votes and matches of a warp |
| mma | mma.sync, and ldmatrix and stmatrix |
| emulated_wgmma | matrix instructions of four warps |
| async_copies | cp.async: copies of 4 to 16 bytes that each thread begins |
| tensor_copies | cp.async.bulk.tensor: boxes of a matrix, moved by the copy engine (TMA) |
| register_pool | setmaxnreg |
| linked_functions | calls of CUDA's functions on float16 and bfloat16, print, array.reshape |
"""
