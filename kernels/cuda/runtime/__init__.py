"""How a kernel gets to run: on a GPU, in the emulator, or in Numba's simulator.

| File | Holds |
|---|---|
| device | chooses where kernels run; checks versions and architectures |
| kernel | a kernel: compiled at its first launch, and launched |
| compiler, kernel_cache | compile a kernel, and keep the result on disk |
| nvvm | which NVVM compiles kernels: the newest that nvJitLink can link |
| assembler_report | registers, spills and shared memory of a kernel |
| gpu_driver, gpu_memory | a GPU's driver and its memory |
| gpu_launch | loads machine code on a GPU and launches it |
| tensor_map, gpu_tensor_maps | what Hopper's copy engine knows of a matrix, and its form on a GPU |
| matrix | a matrix as kernels take it |
| torch_tensors | checks torch tensors, and views them as matrices |
"""
