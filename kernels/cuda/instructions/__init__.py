"""GPU instructions as functions that Numba's kernels call. This is the lowest folder of the CUDA ladder.

| File | Holds |
|---|---|
| inline_ptx | how a PTX instruction becomes a function |
| copies | vector loads and stores, asynchronous copies |
| warp_fragments | what a warp does for its tensor core: ldmatrix, mma, conversions |
| barriers | mbarriers, clusters, fences (Hopper) |
| tma | the copy engine (Hopper) |
| wgmma | matrix instructions of a warp group (Hopper) |
"""
