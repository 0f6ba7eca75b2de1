"""Rungs of the project's CUDA ladder in a lesson: counted in the emulator, and timed where there is a GPU.

counts = counted(6, a, b)             # a Profile of rung 6, s6_vector_loads
tflops = on_gpu(6, 4096)              # None where there is no GPU that runs it
"""

from __future__ import annotations

import os
import statistics
from typing import Any
from unittest import mock

from minidist.kernels.attention_rung import AttentionRung
from minidist.kernels.cuda import CUDA_LADDER
from minidist.kernels.cuda.cuda_rung import CudaRung
from minidist.kernels.cuda.emulator import Profile, profiled
from minidist.kernels.cuda.runtime.device import VARIABLE, backend


def rung(number: int) -> CudaRung:
    """The rung with this number."""
    return next(each for each in CUDA_LADDER if each.number == number)


def counted(number: int, a: Any, b: Any) -> Profile:
    """What a rung does as it multiplies two arrays: in the emulator, even where there is a GPU."""
    with mock.patch.dict(os.environ, {VARIABLE: "emulator"}), profiled(rung(number).name) as counts:
        rung(number).matmul(a, b)
    return counts


def counted_attention(step: AttentionRung, *tensors: Any) -> Profile:
    """What a rung of attention does with q, k and v, (T, D) each, in the first dtype that it takes."""
    import torch

    inputs = [x.to(getattr(torch, step.dtypes[0])) for x in tensors]
    with mock.patch.dict(os.environ, {VARIABLE: "emulator"}), profiled() as counts:
        step.attention(*inputs)
    return counts


def on_gpu(number: int, n: int, dtype: str = "float32", rounds: int = 5) -> float | None:
    """TFLOP/s of a rung for n x n x n on the GPU, by its own clock; None where there is none that runs it."""
    try:
        if backend() != "gpu":
            return None
    except RuntimeError:  # a driver that is too old: `minidist doctor` has the remedy
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    a, b = (torch.rand(n, n, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
    try:
        rung(number).matmul(a, b)  # compiles
    except RuntimeError:  # a GPU that is too old for this rung
        return None
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        rung(number).matmul(a, b)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)  # from milliseconds
    return 2 * n**3 / statistics.median(times) / 1e12


def speed(tflops: float | None) -> str:
    """A time on the GPU in words."""
    return "no GPU here that runs it" if tflops is None else f"{tflops:.1f} TFLOP/s"
