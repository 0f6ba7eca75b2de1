"""Each rung of the CPU ladder beside numpy's BLAS, float32, one thread each: how far is it from the library?

A rung's product is checked before it is timed. Sizes stop where a rung would take more than about a second.
"""

from __future__ import annotations

import numpy as np
import pytest
import threadpoolctl
from _pytest.mark import ParameterSet

from minidist.benchmarks.turns import Benchmark, compared, turns
from minidist.kernels import CPU_LADDER, Rung, harness
from minidist.kernels.rung import empty

# The largest size of a quick run and of a full one: cubes, so eight times the work at each step.
LARGEST = {1: (64, 128), 2: (256, 512)}
LARGEST_COMPILED = (512, 1024)
SIZES = (64, 128, 256, 512, 1024)


def _cases() -> list[ParameterSet]:
    cases = []
    for rung in CPU_LADDER:
        quick, full = LARGEST.get(rung.number, LARGEST_COMPILED)
        for size in SIZES:
            if size <= full:
                marks = [pytest.mark.full_only] if size > quick else []
                cases.append(pytest.param(rung, size, id=f"{rung.name}-{size}", marks=marks))
    return cases


@pytest.mark.parametrize(("rung", "size"), _cases())
@compared("Matrix products on one CPU core, float32")
def test_rung(benchmark: Benchmark, full: bool, rung: Rung, size: int) -> None:
    """Square products of `size`, GFLOP/s and the share of BLAS's speed."""
    a, b = harness.inputs(size, size, size, np.float32, seed=size)
    out, blas_out = (empty(size, size, np.float32) for _ in range(2))
    with threadpoolctl.threadpool_limits(1):
        rung.matmul(a, b, out=out)
        harness.assert_product(out, a, b, f"rung {rung.name}, size {size}")
        turns(
            benchmark,
            lambda: rung.matmul(a, b, out=out),
            lambda: np.matmul(a, b, out=blas_out),
            peer_name="numpy.matmul",
            budget=3.0 if full else 0.7,
        )
    work = harness.flops(size, size, size) / 1e9
    extra = benchmark.extra_info
    extra |= {
        "label": f"{rung.name}, {size}",
        "series": f"{rung.number} {rung.name.partition('_')[2].replace('_', ' ')}",
    }
    extra |= {"size": size}
    if not benchmark.disabled:
        extra["gflops"] = work / benchmark.stats.stats.median
        extra["peer_gflops"] = work / extra["peer_median"]
        extra["percent_of_peer"] = 100 / extra["ratio"]
