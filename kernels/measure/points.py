"""A point of a roofline: how fast a product ran, and what the machine allows at its intensity.

The intensity counts the fewest bytes that a product can move: a and b read once, c written once. A kernel
that fetches operands again has a lower intensity, and may be at its own roof although it appears below this
one. If all three fit the caches, a repeated call moves no such bytes at all, and may be above the slope of
the roof.

Source: Williams, Waterman, Patterson, CACM 52(4), 2009, which counts bytes between caches and main memory.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from ..rung import Rung, empty
from . import gpu_timer, product_checks, timing_in_turns
from .peaks import Roof

Multiplication = Rung | Callable[..., Any]  # a rung, numpy.matmul, or any function of two arrays


def intensity(m: int, n: int, k: int, dtype: DTypeLike = "float32") -> float:
    """Return FLOP/byte of (m, k) times (k, n), each element moved once: n / 6 for squares in float32.

    Raises ValueError for a size below 1.
    """
    if min(m, n, k) < 1:
        raise ValueError(f"m, n, k are {m}, {n}, {k}: pass 1 or more, as an empty product has no rate")
    return product_checks.flops(m, n, k) / product_checks.least_bytes(m, n, k, dtype)


@dataclass(frozen=True)
class Point:
    """A product of (m, k) by (k, n) on a roofline."""

    name: str
    m: int
    n: int
    k: int
    dtype: str
    seconds: float  # of one product
    roof: Roof  # what it is measured against
    stored: str = ""  # the dtype in memory, if it is multiplied in another: float32 as "tf32" or "bfloat16"

    def __post_init__(self) -> None:
        intensity(self.m, self.n, self.k)
        self.roof.peak(self.dtype)
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds is {self.seconds}: pass the time of one product, more than 0")

    @property
    def rate(self) -> float:
        """Return the measured FLOP/s."""
        return product_checks.flops(self.m, self.n, self.k) / self.seconds

    @property
    def bytes(self) -> int:
        """Return the fewest bytes that the product moves: a and b read once, c written once."""
        return product_checks.least_bytes(self.m, self.n, self.k, self.stored or self.dtype)

    @property
    def intensity(self) -> float:
        """Return the FLOP/byte with the fewest bytes: no kernel for this product has more."""
        return intensity(self.m, self.n, self.k, self.stored or self.dtype)

    @property
    def attainable(self) -> float:
        """Return the FLOP/s that the roof allows at this intensity."""
        allowed: float = self.roof.attainable(self.intensity, self.dtype)
        return allowed

    @property
    def share(self) -> float:
        """Return `rate` over `attainable`; it is above 1 if operands come from caches, not from memory."""
        return self.rate / self.attainable

    @property
    def bound(self) -> Literal["memory", "arithmetic"]:
        """Return the limit at this intensity: memory left of the ridge, arithmetic from there on."""
        return "memory" if self.intensity < self.roof.ridge(self.dtype) else "arithmetic"

    def __str__(self) -> str:
        return (
            f"{self.name}, {self.m} x {self.n} x {self.k}, {self.dtype}: {self.rate / 1e9:.3g} GFLOP/s, "
            f"{100 * self.share:.2g}% of the {self.attainable / 1e9:.3g} GFLOP/s that {self.bound} allows "
            f"at {self.intensity:.3g} FLOP/byte ({self.roof.name})"
        )


def median_seconds(
    product: Multiplication, m: int, n: int, k: int, dtype: DTypeLike, threads: int, seconds: float
) -> float:
    """Return the median time of a call with (m, k) and (k, n): calls for `seconds`, but at least three.

    One call before is not timed. BLAS and OpenMP get `threads` threads.
    """
    from threadpoolctl import threadpool_limits

    a, b = product_checks.inputs(m, n, k, dtype, seed=0)
    function = product.matmul if isinstance(product, Rung) else product
    # Use memory that exists already, or the time would include the pages of a new array.
    out = {"out": empty(m, n, dtype)} if isinstance(product, (Rung, np.ufunc)) else {}
    call = functools.partial(function, a, b, **out)
    with threadpool_limits(threads):
        return statistics.median(timing_in_turns.time_in_turns({"product": call}, None, seconds)["product"])


def median_gpu_seconds(
    product: Multiplication, m: int, n: int, k: int, dtype: str, timer: gpu_timer.GpuTimer, seconds: float
) -> float:
    """Return `median_seconds` with tensors (m, k) and (k, n) on torch's GPU, by the GPU's own clock."""
    import torch

    kind = getattr(torch, dtype)
    # Random values: zeros switch fewer transistors, and the clock would be higher than in real work.
    a, b = (torch.randn(shape, device=timer.device).to(kind) for shape in ((m, k), (k, n)))
    function = product.matmul if isinstance(product, Rung) else product
    out = {"out": torch.empty(m, n, device=timer.device, dtype=kind)} if isinstance(product, Rung) else {}
    call = functools.partial(function, a, b, **out)
    return statistics.median(gpu_timer.rounds(timer, call, seconds, least=3))


def product_name(product: Multiplication) -> str:
    """Return a product's name: the rung's, "numpy.matmul", or a function's own; TypeError if not callable."""
    if isinstance(product, Rung):
        return product.name
    if not callable(product):
        raise TypeError(f"product is {product!r}: pass a rung, as in rung('s4'), or a function of two arrays")
    name: str = getattr(product, "__name__", type(product).__name__)
    return f"numpy.{name}" if isinstance(product, np.ufunc) else name
