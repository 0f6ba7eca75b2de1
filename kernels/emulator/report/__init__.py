"""`launch` and `profile`: run a user's Numba kernel in the emulator, and show what it did.

This is the only package here that knows kernels/cuda, whose compiler turns a kernel into PTX.

| File | Holds |
|---|---|
| launch | launch, profile and profiled |
| profile_table | Profile: the counts as figures and as a table |
"""
