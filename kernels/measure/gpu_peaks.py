"""Measure a GPU's peaks with torch: a copy within its memory, and the vendor's product in each dtype.

A Python loop can't saturate a GPU's arithmetic, so the product of the vendor's library (cuBLAS) stands for
it, at a size where arithmetic is the limit. The true peak is a little higher. CUDA events time the GPU's own
clock, not the calls; each figure is the best of several.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

from .peaks import Roof

# n of the n x n x n product, larger for fast arithmetic. "tf32" is float32 with factors rounded to 10 bits of
# mantissa, for the tensor cores.
SIZES = {"float32": 4096, "tf32": 8192, "float16": 8192, "bfloat16": 8192, "float64": 4096}
TENSOR_CORES_ONLY = {"tf32", "bfloat16"}  # older GPUs run these as something else
COPY = 2**30  # bytes: many times any GPU's caches
CALLS = 4  # between two events, so that the GPU does not wait for Python


def roof(seconds: float = 0.2) -> Roof | None:
    """Measure and return the roof of torch's current GPU, `seconds` for each figure; None without a GPU.

    Raises RuntimeError if torch sees a GPU but can't use it: others fill its memory, or this build has no
    code for it.
    """
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    ampere = torch.cuda.get_device_capability() >= (8, 0)
    precision = torch.get_float32_matmul_precision()
    try:
        flops = {
            dtype: _product_rate(torch, dtype, size, seconds)
            for dtype, size in SIZES.items()
            if ampere or dtype not in TENSOR_CORES_ONLY
        }
        return Roof(torch.cuda.get_device_name(), flops, _copy_rate(torch, seconds))
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.cuda.empty_cache()  # torch keeps freed memory to itself otherwise


def _product_rate(torch: Any, dtype: str, n: int, seconds: float) -> float:
    """Return FLOP/s of an n x n x n product; n is halved until its matrices take half of the free memory."""
    kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    while 3 * n * n * kind.itemsize > torch.cuda.mem_get_info()[0] // 2 and n > 1:
        n //= 2
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    # Random values: zeros switch fewer transistors, and the clock would be higher than in real work.
    a, b = (torch.randn(n, n, device="cuda", dtype=kind) for _ in range(2))
    c = torch.empty(n, n, device="cuda", dtype=kind)
    return 2 * n**3 / _best_seconds(torch, lambda: torch.matmul(a, b, out=c), seconds)


def _copy_rate(torch: Any, seconds: float) -> float:
    """Return the bytes that a copy reads and writes per second."""
    size: int = min(COPY, torch.cuda.mem_get_info()[0] // 4)
    source, target = (torch.ones(size, device="cuda", dtype=torch.uint8) for _ in range(2))
    return 2 * size / _best_seconds(torch, lambda: target.copy_(source), seconds)


def _best_seconds(torch: Any, call: Callable[[], object], seconds: float) -> float:
    call()  # loads the library and chooses its kernel
    torch.cuda.synchronize()
    best, spent = math.inf, 0.0
    while spent < seconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        took: float = start.elapsed_time(end) / 1e3  # from milliseconds
        best, spent = min(best, took / CALLS), spent + took
    return best
