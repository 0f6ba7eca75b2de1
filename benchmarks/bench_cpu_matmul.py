"""The CPU ladder in turns with NumPy's BLAS: how far each rung is from the library and from the peak.

Each rung's product is checked before it is timed. A rung's sizes end where a product would take about a
second.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable

import numpy as np
import pytest
import threadpoolctl
from _pytest.mark import ParameterSet

from minidist.benchmarks.harness.turns import Benchmark, case, compared, turns
from minidist.kernels import CPU_LADDER, Rung
from minidist.kernels.cpu.s8_matrix_unit import MODES
from minidist.kernels.cpu.s8_matrix_unit import RUNG as UNIT
from minidist.kernels.cpu.support import thread_pool
from minidist.kernels.cpu.support.bf16_instructions import AMX, AVX512_BF16, NONE, matrix_unit
from minidist.kernels.measure import product_checks, roofline
from minidist.kernels.rung import Array, empty

# The largest size of a quick run and of a full one: cubes, so eight times the work at each step.
LARGEST = {"s1_python_loops": (64, 128), "s2_vectors": (256, 512)}
LARGEST_COMPILED, LARGEST_LAST = (512, 1024), (2048, 4096)
SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
# Rung 8 makes float32 of bf16 numbers: `test_matrix_unit` times it.
LADDER = tuple(step for step in CPU_LADDER if "bfloat16" not in step.dtypes)
# What rung 8 is compared with in each mode, and the goal for our time over theirs by what the CPU multiplies.
UNIT_GOALS = {
    ("bf16", "numpy"): {AMX: 1 / 8},
    ("bf16", "rung"): {AVX512_BF16: 1 / 1.8},
    ("bf16", "torch"): {AMX: 1.0, AVX512_BF16: 1.0},
    ("bf16x3", "numpy"): {AMX: 1 / 3},
    ("bf16x6", "numpy"): {AMX: 1 / 1.3},
}
ONE_CORE = tuple(step for step in LADDER if step.cores == "one")
LAST, LAST_ALL_CORES = ONE_CORE[-1], [step for step in LADDER if step.cores == "all"][-1]
# Each rung and the one before it, at a size that the slower one reaches.
PAIRS = [
    (min(512, LARGEST.get(before.name, LARGEST_COMPILED)[1]), before, step)
    for before, step in itertools.pairwise(LADDER)
]
# m, n, k, and whether a quick run has them.
TALL_AND_FLAT = {
    (4096, 4096, 64): False,
    (4096, 64, 4096): False,
    (64, 64, 4096): False,
    (64, 4096, 64): True,
    (2048, 1, 2048): True,
}
AGAIN = 2  # times that a run measures the peaks again
# Seconds between turns on all cores: BLAS's threads spin for 0.1 s after a product, on cores that are needed.
PAUSE = 0.12
# Our time over BLAS's.
GOALS = {"small": 2.0, "float32": 1.0, "float64": 1 / 0.95, "tall and flat": 1 / 0.9}


def cases() -> list[ParameterSet]:
    """Every rung on one core at each of its sizes."""
    return [
        case(step, size, name=f"{step.name}-{size}", quick=size <= quick)
        for step in ONE_CORE
        for quick, full in [LARGEST_LAST if step is LAST else LARGEST.get(step.name, LARGEST_COMPILED)]
        for size in SIZES
        if size <= full
    ]


@pytest.mark.parametrize(("step", "size"), cases())
@compared("Matrix products on one CPU core, float32")
def test_rung(benchmark: Benchmark, full: bool, step: Rung, size: int) -> None:
    """Square products of `size`, GFLOP/s and the share of BLAS's speed.

    `test_all_cores` times the last rung on all cores, and `test_step` every rung beside the one before it.
    """
    goal = {64: "small", 1024: "float32", 2048: "float32", 4096: "float32"}.get(size)
    _beside_blas(benchmark, step, (size,) * 3, "float32", full, goal if step is LAST else None)
    benchmark.extra_info |= {
        "label": f"{step.name}, {size}",
        "series": f"{step.number} {step.name.partition('_')[2].replace('_', ' ')}",
        "size": size,
    }


@pytest.mark.parametrize(
    "size", [case(size, name=str(size), quick=size == 1024) for size in (64, 512, 1024, 2048, 4096)]
)
@compared("Matrix products on one CPU core, float64")
def test_float64(benchmark: Benchmark, full: bool, size: int) -> None:
    """The last rung on one core, in double precision."""
    goal = "float64" if size >= 1024 else None
    _beside_blas(benchmark, LAST, (size,) * 3, "float64", full, goal)
    benchmark.extra_info |= {"label": f"{LAST.name}, {size}"}


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *(case("float32", size, name=f"float32-{size}", quick=size <= 2048) for size in SIZES),
        *(case("float64", size, name=f"float64-{size}", quick=size == 1024) for size in SIZES[2:]),
    ],
)
@compared("Matrix products on all cores")
def test_all_cores(benchmark: Benchmark, full: bool, dtype: str, size: int) -> None:
    """The last rung on all cores, in turns with BLAS on as many threads."""
    goal = "float32" if size >= 1024 and dtype == "float32" else None
    _beside_blas(benchmark, LAST_ALL_CORES, (size,) * 3, dtype, full, goal)
    benchmark.extra_info |= {"label": f"{LAST_ALL_CORES.name}, {size}, {dtype}"}


@pytest.mark.parametrize("step", [LAST, LAST_ALL_CORES], ids=lambda step: step.name)
@pytest.mark.parametrize(
    "shape", [case(shape, name="x".join(map(str, shape)), quick=q) for shape, q in TALL_AND_FLAT.items()]
)
@compared("Tall and flat products, float32: m x n x k")
def test_tall_and_flat(benchmark: Benchmark, full: bool, shape: tuple[int, int, int], step: Rung) -> None:
    """Products with one or two short sides, where packing and memory traffic weigh more."""
    _beside_blas(benchmark, step, shape, "float32", full, "tall and flat")
    benchmark.extra_info |= {"label": f"{step.name}, {' x '.join(map(str, shape))}"}


@pytest.mark.full_only
@pytest.mark.parametrize(("size", "before", "step"), PAIRS, ids=[pair[2].name for pair in PAIRS])
@compared("Each rung beside the one before it, float32")
def test_step(benchmark: Benchmark, full: bool, size: int, before: Rung, step: Rung) -> None:
    """How much one idea gains: each rung in turns with the one before it."""
    a, b = product_checks.inputs(size, size, size, np.float32, seed=size)
    out, out_before = (empty(size, size, np.float32) for _ in range(2))
    turns(
        benchmark,
        lambda: step.matmul(a, b, out=out),
        lambda: before.matmul(a, b, out=out_before),
        peer_name=before.name,
        budget=3.0 if full else 0.4,
    )
    benchmark.extra_info |= {"label": f"{step.name}, {size}", "goal": {"of": "ratio", "below": 1.0}}


@pytest.mark.parametrize("cores", ["one", "all"])
@pytest.mark.parametrize(("mode", "peer"), UNIT_GOALS)
@pytest.mark.parametrize("size", [case(n, name=str(n), quick=n == 1024) for n in (512, 1024, 2048)])
@compared("Rung 8, the matrix unit")
def test_matrix_unit(
    benchmark: Benchmark,
    full: bool,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    mode: str,
    peer: str,
    cores: roofline.Cores,
) -> None:
    """float32 as bf16 numbers beside NumPy's float32 and the rung before, and bf16 tensors beside torch's."""
    import torch

    if not matrix_unit():
        pytest.skip(NONE)
    alone = cores == "one"
    before = LAST if alone else LAST_ALL_CORES
    a, b = product_checks.inputs(size, size, size, np.float32, seed=size)
    x, y = (torch.from_numpy(each).bfloat16() for each in (a, b))
    out, theirs = (empty(size, size, np.float32) for _ in range(2))
    rounded, torchs = (torch.empty(size, size, dtype=torch.bfloat16) for _ in range(2))
    peers: dict[str, tuple[str, Callable[[], object]]] = {
        "numpy": ("numpy.matmul", lambda: np.matmul(a, b, out=theirs)),
        "rung": (before.name, lambda: before.matmul(a, b, out=theirs)),
        "torch": ("torch.matmul, bfloat16", lambda: torch.matmul(x, y, out=torchs)),
    }

    def ours() -> object:
        return UNIT.matmul(x, y, out=rounded) if peer == "torch" else UNIT.matmul(a, b, out=out, mode=mode)

    with contextlib.ExitStack() as stack:
        if alone:
            monkeypatch.setattr(thread_pool, "threads", lambda: 1)
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            stack.enter_context(threadpoolctl.threadpool_limits(1))
        UNIT.matmul(a, b, out=out, mode=mode)
        _check(UNIT, out, a, b, MODES[mode][1])
        budget, pause = (3.0 if full else 0.4) * (1 if alone else 3), 0.0 if alone else PAUSE
        name, product = peers[peer]
        turns(benchmark, ours, product, peer_name=name, budget=budget, pause=pause)
    _rates(benchmark, (size,) * 3, "bfloat16", cores)
    exact = product_checks.reference(a[:64], b)
    error = np.sqrt(((out[:64] - exact) ** 2).mean() / (exact**2).mean())
    benchmark.extra_info |= {
        "label": f"{mode}, {size}, {cores} beside {name}",
        "note": f"{matrix_unit()}; error {error:.1e} (rms)",
        "arithmetic": "bfloat16",
    }
    if (mode, peer, cores) == ("bf16", "numpy", "one"):
        benchmark.extra_info |= {"series": "8 matrix unit, bf16", "size": size}
    if matrix_unit() in UNIT_GOALS[mode, peer]:
        benchmark.extra_info["goal"] = {"of": "ratio", "below": UNIT_GOALS[mode, peer][matrix_unit()]}


def _beside_blas(
    benchmark: Benchmark, step: Rung, shape: tuple[int, int, int], dtype: str, full: bool, goal: str | None
) -> None:
    """Compare a rung with NumPy, for as long as a quick or a full run allows."""
    budget = (3.0 if full else 0.4) * (1 if step.cores == "one" else 6 if full else 3)
    beside_blas(benchmark, step, shape, dtype, budget)
    if goal:
        benchmark.extra_info["goal"] = {"of": "ratio", "below": GOALS[goal]}


def beside_blas(
    benchmark: Benchmark, step: Rung, shape: tuple[int, int, int], dtype: str, budget: float
) -> None:
    """Check a rung's product, and time it in turns with NumPy's on as many cores, for `budget` seconds."""
    m, n, k = shape
    a, b = product_checks.inputs(m, n, k, dtype, seed=m + n + k)
    out, blas_out = (empty(m, n, dtype) for _ in range(2))
    alone = step.cores == "one"
    with threadpoolctl.threadpool_limits(1) if alone else contextlib.nullcontext():
        step.matmul(a, b, out=out)
        _check(step, out, a, b)
        turns(
            benchmark,
            lambda: step.matmul(a, b, out=out),
            lambda: np.matmul(a, b, out=blas_out),
            peer_name="numpy.matmul",
            budget=budget,
            pause=0.0 if alone else PAUSE,
        )
    if not alone:
        time.sleep(PAUSE)  # leave the cores free for the next benchmark
    _rates(benchmark, shape, dtype, step.cores)


def _check(step: Rung, c: Array, a: Array, b: Array, factors: float = 0.0) -> None:
    """Check all of a small product, or some rows and columns: a large reference takes seconds."""
    if c.size <= 512 * 512:
        product_checks.assert_product(c, a, b, f"rung {step.name}", factors=factors)
        return
    rows, columns = (np.linspace(0, size - 1, 64, dtype=int) for size in c.shape)
    some = c[np.ix_(rows, columns)]
    product_checks.assert_product(some, a[rows], b[:, columns], f"rung {step.name}", factors=factors)


def _rates(benchmark: Benchmark, shape: tuple[int, int, int], dtype: str, cores: roofline.Cores) -> None:
    """Enter what the times mean: FLOP/s, the share of BLAS's rate, and the share of the machine's peak."""
    if benchmark.disabled:
        return
    extra, work = benchmark.extra_info, product_checks.flops(*shape) / 1e9
    extra["gflops"] = work / benchmark.stats.stats.median
    extra["peer_gflops"] = work / extra["peer_median"]
    extra["percent_of_peer"] = 100 / extra["ratio"]
    peak, raised = peak_of(cores, dtype, 1e9 * extra["gflops"])
    extra["percent_of_peak"] = 100 * 1e9 * extra["gflops"] / peak
    extra["peak_gb_per_s"] = machine_peaks().roof(cores).bandwidth / 1e9
    if raised:
        extra["note"] = "the machine was busy when its peak was measured: it was measured again"


def peak_of(cores: roofline.Cores, dtype: str, rate: float) -> tuple[float, bool]:
    """The peak in FLOP/s, and whether it had to be measured again, since a product with `rate` exceeded it.

    Where no new measurement explains the rate, the rate itself is the best that is known of the peak.
    """
    first = peak = machine_peaks().roof(cores).peak(dtype)
    for again in range(1, 1 + AGAIN):
        if rate > peak:
            peak = max(peak, machine_peaks(again).roof(cores).peak(dtype))
    return max(peak, rate), rate > first


@functools.cache
def machine_peaks(again: int = 0) -> roofline.Peaks:
    """This machine's peaks, measured again if it was busy the first time; each `again` measures once more."""
    kept = roofline.measure(fresh=again > 0)
    return roofline.measure(fresh=True) if kept.busy and not again else kept
