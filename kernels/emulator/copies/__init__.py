"""Asynchronous copies into shared memory and back, and clusters of blocks.

A copy is carried out as late as the kernel allows, so a kernel that does not wait reads old data.

| File | Holds |
|---|---|
| async_copies | cp.async: copies of 4 to 16 bytes that each thread begins |
| bulk_copies | cp.async.bulk.tensor: tensor copies by the copy engine (TMA) |
| tensor_copies | loads and stores under way, and the bytes that they move: boxes, swizzles, tensor maps |
| clusters | mapa, barrier.cluster, and accesses to another block's shared memory |
"""
