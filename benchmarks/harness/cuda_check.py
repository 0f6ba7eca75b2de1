"""Whether a product on a GPU is right: against float64, computed there, within the bound that was derived.

`kernels.harness` does the same for NumPy arrays, and has the bounds; a CPU takes seconds for its reference at
4096. Of larger products 256 whole rows and 256 whole columns are checked: one is drawn from each 256th of
them, so that at 16384 every aligned tile of 64 x 64 has some of its elements among them. That the result is
finite is checked everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minidist.kernels.measure import harness

LARGEST_WHOLE = 4096  # rows, columns or terms of a product that is checked whole
SAMPLES = 256  # rows, and columns, of a larger one


def assert_product(c: Any, a: Any, b: Any, message: str, *, sums: str, tf32: bool, seed: int) -> float:
    """Raise AssertionError unless c (m, n) is a (m, k) times b (k, n), but for rounding; all of it finite.

    Args:
        c, a, b: tensors on one device.
        message: what an error begins with.
        sums: the name of the dtype in which the products were added.
        tf32: whether factors of float32 were rounded to TF32.
        seed: of the rows and columns that are checked where there are many.

    Returns:
        The largest error in units of |a||b|.
    """
    import torch

    unwritten = int((~torch.isfinite(c)).sum())
    if unwritten:
        raise AssertionError(f"{message}: {unwritten} of {c.numel()} elements are not finite")
    k = a.shape[1]
    tolerance, rounding, smallest = 1.0 * bound(k, _name(a), sums, tf32), 0.0, 0.0
    if _name(c) != sums:  # each sum is rounded once more, or to a subnormal number
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
        wrong = ~(error <= tolerance * scale + rounding * expected.abs() + smallest)  # NaN is wrong, too
        if wrong.any():
            i, j = (int(x) for x in wrong.nonzero()[0])
            raise AssertionError(
                f"{message}: {int(wrong.sum())} of {wrong.numel()} elements that were checked are wrong; "
                f"c[{int(rows[i])}, {int(columns[j])}] is {float(c[rows[i], columns[j]]):.8g}, "
                f"not {float(expected[i, j]):.8g}"
            )
        largest = max(largest, float((error / scale.clamp_min(torch.finfo(torch.float64).tiny)).max()))
    return largest


def bound(k: int, dtype: str, sums: str, tf32: bool) -> float:
    """The largest error of a sum of k products, and of its float64 reference, in units of |a||b|."""
    # All it asks is whether sums are wider than factors; NumPy knows bfloat16 only with ml_dtypes.
    factors = "float16" if dtype == "bfloat16" else dtype
    return harness.error_bound(k, factors, sums, tf32) + harness.error_bound(k, "float64", "float64")


def samples(m: int, n: int, k: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Rows and columns of c (m, n) that are checked: all, or some rows in all columns, and the other way."""
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


def _name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")
