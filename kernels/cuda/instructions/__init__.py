"""Instructions of the GPU as functions that Numba's kernels call: copies, barriers, matrix instructions."""
