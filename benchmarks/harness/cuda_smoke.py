"""Check one rung of a CUDA ladder on small and ragged products, or heads, before anything is timed.

    python -m minidist.benchmarks.harness.cuda_smoke s10_hopper

Each product begins in memory full of NaN and is compared with float64. On a machine without a GPU the
emulator runs one ragged product of each dtype, so the command can be tried anywhere.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence

from minidist.benchmarks.harness.cuda import cuda_check
from minidist.kernels.cuda import attention, load
from minidist.kernels.measure import gpu_timer

SHAPES = ((512, 512, 512), (256, 512, 1024), (129, 257, 72), (300, 130, 65), (1, 7, 3))  # m, n, k
EMULATED = ((33, 40, 24),)
ORDERS = ("nn", "nt", "tn")  # of a and b, in BLAS's letters


def smoke(
    name: str,
    *,
    dtypes: Sequence[str] = (),
    shapes: Sequence[tuple[int, int, int]] = (),
    orders: Sequence[str] = ORDERS,
) -> Iterator[str]:
    """Check a rung in these dtypes, by default each of its own; yield a line for each.

    Raises AssertionError for a wrong product, and RuntimeError for one that does not end in half a minute.
    """
    import torch

    rung, timer = load(name), gpu_timer.find()
    device = "cuda" if timer is not None else "cpu"

    def drawn(rows: int, columns: int, order: str, kind: torch.dtype) -> torch.Tensor:
        if order == "t":
            return drawn(columns, rows, "n", kind).T
        return torch.randn(rows, columns, device=device).to(kind)

    shapes = shapes or (SHAPES if timer is not None else EMULATED)
    wait = timer.wait if timer is not None else (lambda: None)
    for dtype in dtypes or rung.dtypes:
        kind, worst, count = getattr(torch, dtype), 0.0, 0
        for (m, n, k), order in itertools.product(shapes, orders):
            a, b = drawn(m, k, order[0], kind), drawn(k, n, order[1], kind)
            c = torch.empty((m, n), device=device, dtype=kind)
            found = cuda_check.check_rung(rung, cuda_check.kind_of(rung, dtype), a, b, c, wait, order, seed=0)
            worst, count = max(worst, found), count + 1
        yield f"right: {name} in {dtype}, {count} products on {device}, largest error {worst:.1e}"


def smoke_attention(name: str) -> Iterator[str]:
    """Check a rung of attention as `smoke` does one of matmul."""
    rung = attention.load(name)
    device = "cuda" if gpu_timer.find() is not None else "cpu"
    for dtype in rung.dtypes:
        worst = cuda_check.check_attention(rung, dtype, device)
        yield f"right: {name} in {dtype} on {device}, largest error {worst:.1e}"


if __name__ == "__main__":
    for line in (smoke_attention if sys.argv[1] in attention.RUNGS else smoke)(sys.argv[1]):
        print(line, flush=True)
