"""Asynchronous copies into shared memory and back.

A copy is carried out as late as the kernel allows, so a kernel that does not wait reads old data.

| File | Holds |
|---|---|
| async_copies | cp.async: copies of 4 to 16 bytes that each thread begins |
| tensor_copies | cp.async.bulk.tensor: boxes of a matrix, moved by the copy engine (TMA) |
"""
