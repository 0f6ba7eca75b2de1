"""The instructions: what each does to a machine, wired to its operands.

`execution/run.py` registers them. Loads and stores are in memory/, barriers in synchronization/, copies in
copies/.

| File | Holds |
|---|---|
| arithmetic | instructions of registers alone; what they compute is in the package `arithmetic` |
| atomics | atom and red |
| warps | shuffles, votes, matches, reductions |
| ldmatrix, mma | matrices between shared memory and registers; mma.sync |
| wgmma, wgmma_products | matrix instructions of four warps; their arithmetic and pending products |
| mbarriers | mbarrier.init, arrive, try_wait, ... |
| register_pool | setmaxnreg |
| half_precision_calls | calls of CUDA's functions on float16 and bfloat16 |
| printing | print |
"""
