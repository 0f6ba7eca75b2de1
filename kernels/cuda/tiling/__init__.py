"""Tiles of matrices in shared memory and registers. This folder builds on `instructions` and `runtime`.

| File | Holds |
|---|---|
| packing | copies a matrix into rows that kernels can read 16 bytes at a time |
| panels | panels of a and b for rungs 6 to 8 |
| tile_order | the order in which blocks take tiles |
| fragment_tiles | tiles of a and b for the tensor cores of rung 9, and its stores |
| lane_exchange | the largest and the sum of a warp's values, for attention |
| wgmma_store | stores rung 10's sums |
"""
