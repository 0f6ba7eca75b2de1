"""How a kernel gets to run: on a GPU, or in the emulator.

| File | Holds |
|---|---|
| device | chooses where kernels run; checks versions and architectures |
| kernel | a kernel: compiled at its first launch, and launched |
| compiler, kernel_cache | compile a kernel, report its registers and spills, keep the result on disk |
| nvvm | which NVVM compiles kernels: the newest that nvJitLink can link |
| gpu_driver | a GPU's driver and its memory |
| gpu_launch | loads machine code on a GPU and launches it, with its tensor maps |
| matrix | a matrix as kernels take it, and as Hopper's copy engine does |
"""
