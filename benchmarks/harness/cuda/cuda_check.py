"""Check a GPU's matrix product against float64, computed on the same GPU, within a derived error bound.

`kernels.measure.product_checks` has the bounds and does the same for NumPy arrays, but a CPU takes seconds
for its reference at size 4096. A larger product is checked in 256 whole rows and 256 whole columns: one drawn
from each 256th of them, so that at 16384 the sample meets every aligned tile of 64 x 64. Every element is
checked to be finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.kernels.measure import attention_reference as attention
from minidist.kernels.measure.product_checks import error_bound
from minidist.kernels.rung import dtype_name

if TYPE_CHECKING:
    from minidist.kernels.cuda.attention.cuda_attention_rung import CudaAttentionRung
    from minidist.kernels.cuda.cuda_rung import CudaRung

LARGEST_WHOLE = 4096  # up to this many rows, columns and terms, a product is checked whole
SAMPLES = 256  # rows, and columns, checked in a larger product


def dtype_of(kind: str) -> str:
    """Return the dtype of the operands of a kind of arithmetic, a dtype or "tf32"."""
    return "float32" if kind == "tf32" else kind


def kind_of(rung: CudaRung, dtype: str) -> str:
    """Return the arithmetic of a rung's products: "tf32" if it rounds float32 to TF32, or else the dtype."""
    return "tf32" if rung.tf32 and dtype == "float32" else dtype


def check_rung(
    rung: CudaRung, kind: str, a: Any, b: Any, c: Any, wait: Callable[[], object], more: str, seed: int
) -> float:
    """Multiply into a result full of NaN, check it, and return the largest error; `more` ends its name."""
    c.fill_(float("nan"))
    rung.matmul(a, b, out=c)
    wait()  # with a limit; to read the result waits for ever if the kernel never ends
    message = f"rung {rung.name}, {c.shape[0]} x {c.shape[1]} x {a.shape[1]} in {kind}, {more}"
    return assert_product(c, a, b, message, sums=rung.sums(dtype_of(kind)), tf32=kind == "tf32", seed=seed)


def check_attention(rung: CudaAttentionRung, dtype: str, device: str) -> float:
    """Check a rung of attention on small and ragged heads, also causal, and return the largest error."""
    import torch

    def to(x: Any) -> Any:
        return torch.from_numpy(x.astype("f4")).to(device, getattr(torch, dtype))

    rng, sizes = np.random.default_rng(), [(1, 1, 1), (37, 150, 33), (133, 133, 64)]
    return max(
        attention.check(rung, ((2,), queries, keys, width), causal, rng, dtype, to)
        for queries, keys, width in sizes
        for causal in (False, True)[: 1 + (queries == keys)]
    )


def assert_product(c: Any, a: Any, b: Any, message: str, *, sums: str, tf32: bool, seed: int) -> float:
    """Raise AssertionError unless c (m, n) is finite and equals a (m, k) times b (k, n), up to rounding.

    Args:
        c, a, b: tensors on one device.
        message: the start of an error message.
        sums: the name of the dtype in which the products were added.
        tf32: whether factors of float32 were rounded to TF32.
        seed: for drawing the rows and columns of a large product.

    Returns:
        The largest error in units of |a||b|.
    """
    import torch

    unwritten = int((~torch.isfinite(c)).sum())
    if unwritten:
        raise AssertionError(f"{message}: {unwritten} of {c.numel()} elements are not finite")
    k = a.shape[1]
    tolerance, rounding, smallest = 1.0 * bound(k, dtype_name(a.dtype), sums, tf32), 0.0, 0.0
    if dtype_name(c.dtype) != sums:  # each sum is rounded once more, possibly to a subnormal number
        info = torch.finfo(c.dtype)
        rounding = info.eps / 2
        tolerance, smallest = tolerance * (1 + rounding), info.tiny * info.eps / 2
    largest = 0.0
    for rows, columns in samples(c.shape[0], c.shape[1], k, seed):
        rows, columns = rows.to(c.device), columns.to(c.device)
        a_part, b_part = a[rows].double(), b[:, columns].double()
        expected = a_part @ b_part
        error = (c[rows][:, columns].double() - expected).abs_()
        scale = a_part.abs_() @ b_part.abs_()
        wrong = ~(error <= tolerance * scale + rounding * expected.abs() + smallest)  # NaN counts as wrong
        if wrong.any():
            i, j = (int(x) for x in wrong.nonzero()[0])
            raise AssertionError(
                f"{message}: {int(wrong.sum())} of {wrong.numel()} checked elements are wrong; "
                f"c[{int(rows[i])}, {int(columns[j])}] is {float(c[rows[i], columns[j]]):.8g}, "
                f"not {float(expected[i, j]):.8g}"
            )
        largest = max(largest, float((error / scale.clamp_min(torch.finfo(torch.float64).tiny)).max()))
    return largest


def bound(k: int, dtype: str, sums: str, tf32: bool) -> float:
    """Bound the error of a sum of k products plus that of its float64 reference, in units of |a||b|."""
    # NumPy lacks bfloat16; float16 stands in, since only "are sums wider than factors?" matters here.
    factors = "float16" if dtype == "bfloat16" else dtype
    return error_bound(k, factors, sums, tf32) + error_bound(k, "float64", "float64")


def samples(m: int, n: int, k: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Yield the rows and columns of c (m, n) to check: all, or some whole rows, then some whole columns."""
    import torch

    everything = torch.arange(m), torch.arange(n)
    if max(m, n, k) <= LARGEST_WHOLE:
        yield everything
        return
    generator = torch.Generator().manual_seed(seed)

    def some(size: int) -> Any:
        edges = torch.linspace(0, size, min(SAMPLES, size) + 1).long()
        room = edges[1:] - edges[:-1]
        return edges[:-1] + (torch.rand(len(room), generator=generator) * room).long()

    yield some(m), everything[1]
    yield everything[0], some(n)
