"""Measure a GPU's peaks with torch: a copy within its memory, and the vendor's product in each dtype.

A Python loop can't saturate a GPU's arithmetic, so the product of the vendor's library (cuBLAS) stands for
it, at a size where arithmetic is the limit. The true peak is a little higher. Each figure is the best of
several, by the GPU's own clock.
"""

from __future__ import annotations

from typing import Any

from . import gpu_timer
from .peaks import Roof

# n of the n x n x n product, larger for fast arithmetic. "tf32" is float32 with factors rounded to 10 bits of
# mantissa, for the tensor cores.
SIZES = {"float32": 4096, "tf32": 8192, "float16": 8192, "bfloat16": 8192, "float64": 4096}
TENSOR_CORES_ONLY = {"tf32", "bfloat16"}  # older GPUs run these as something else
COPY = 2**30  # bytes: many times any GPU's caches
CALLS = 4  # between two events


def roof(seconds: float = 0.2) -> Roof | None:
    """Measure and return the roof of torch's current GPU, `seconds` for each figure; None without a GPU.

    Raises RuntimeError if torch sees a GPU but can't use it: others fill its memory, or this build has no
    code for it.
    """
    timer = gpu_timer.find()
    if timer is None:
        return None
    import torch

    ampere = torch.cuda.get_device_capability() >= (8, 0)
    precision = torch.get_float32_matmul_precision()
    try:
        flops = {
            dtype: _product_rate(torch, timer, dtype, size, seconds)
            for dtype, size in SIZES.items()
            if ampere or dtype not in TENSOR_CORES_ONLY
        }
        return Roof(torch.cuda.get_device_name(), flops, _copy_rate(torch, timer, seconds))
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.cuda.empty_cache()  # torch keeps freed memory to itself otherwise


def _product_rate(torch: Any, timer: gpu_timer.GpuTimer, dtype: str, n: int, seconds: float) -> float:
    """Return FLOP/s of an n x n x n product; n is halved until its matrices take half of the free memory."""
    kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    while 3 * n * n * kind.itemsize > torch.cuda.mem_get_info()[0] // 2 and n > 1:
        n //= 2
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    # Random values: zeros switch fewer transistors, and the clock would be higher than in real work.
    a, b = (torch.randn(n, n, device="cuda", dtype=kind) for _ in range(2))
    c = torch.empty(n, n, device="cuda", dtype=kind)
    return 2 * n**3 / min(gpu_timer.rounds(timer, lambda: torch.matmul(a, b, out=c), seconds, CALLS))


def _copy_rate(torch: Any, timer: gpu_timer.GpuTimer, seconds: float) -> float:
    """Return the bytes that a copy reads and writes per second."""
    size: int = min(COPY, torch.cuda.mem_get_info()[0] // 4)
    source, target = (torch.ones(size, device="cuda", dtype=torch.uint8) for _ in range(2))
    return 2 * size / min(gpu_timer.rounds(timer, lambda: target.copy_(source), seconds, CALLS))
