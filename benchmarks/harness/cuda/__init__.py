"""The CUDA ladder on a GPU, rung by rung. `cuda_smoke.py` in the folder above checks a rung by hand.

one_rung               gives each rung a process of its own, with a time limit
compile_ladder         compiles all rungs on all cores before they are measured
cuda_timing            operands, rounds and the GPU's clock
cuda_check             checks a GPU's product against float64
"""
