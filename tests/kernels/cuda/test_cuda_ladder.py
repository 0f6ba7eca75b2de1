"""Every rung of the CUDA ladder without a GPU: what it computes, in the emulator, and what it counts there.

What the assembler makes of the same kernels is in `test_cuda_static.py`, and that these checks can fail in
`test_cuda_mutants.py`.
"""

import functools
import importlib

import numpy as np
import pytest

from minidist.kernels import cuda
from minidist.kernels.cuda.runtime import gpu_driver
from minidist.kernels.measure import product_checks
from tests.helpers.products import check_ladder, check_laid_out, check_not_finite, laid_out

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")
pytest.importorskip("ml_dtypes")

from minidist.kernels.cuda import CUDA_LADDER
from minidist.kernels.emulator import profiled
from tests.helpers.cuda_kernels import events_of, without_gpu  # noqa: F401

# Past a tile each way, at least.
LARGEST = {1: 45, 2: 45, 3: 45, 4: 80, 5: 140, 6: 140, 7: 140, 8: 140, 9: 140, 10: 270}
BY_LAYOUT = CUDA_LADDER[5:]  # rungs that are compiled for the order of a and of b
TENSOR_CORES = CUDA_LADDER[8:]
EVERY_DTYPE = [(step, dtype) for step in CUDA_LADDER for dtype in step.dtypes]

every_rung = pytest.mark.parametrize("step", CUDA_LADDER, ids=lambda step: step.name)
every_dtype = pytest.mark.parametrize(
    ("step", "dtype"), EVERY_DTYPE, ids=[f"{step.name}-{dtype}" for step, dtype in EVERY_DTYPE]
)


@pytest.fixture
def multiprocessors(monkeypatch):
    """multiprocessors(n): what rungs are told of the GPU, by which some choose their tiles."""
    return lambda n: monkeypatch.setattr(gpu_driver, "multiprocessors", lambda: n)


@pytest.fixture
def large_tiles(monkeypatch):
    """large_tiles(step): only those that a rung has for large products."""

    def use(step):
        module = importlib.import_module(f"minidist.kernels.cuda.{step.name}")
        if step.number == 10:
            monkeypatch.setattr(module, "COLUMNS", module.COLUMNS[:1])
        elif step.number >= 8:
            monkeypatch.setattr(module, "SMALL", module.LARGE)

    return use


def test_the_ladder_holds_every_rung_file_in_order():
    check_ladder(cuda, CUDA_LADDER, lambda step: f"Rung {step.number}: ")


@every_dtype
def test_ragged_sizes(step, dtype, large_tiles):
    """Of small tiles, but for bfloat16 and TF32; `test_the_large_tiles` has the others."""
    if step in TENSOR_CORES and dtype != "float16":
        large_tiles(step)
    rng = np.random.default_rng()
    for m, n, k in product_checks.shapes(rng, 7, LARGEST[step.number]):
        product_checks.check(step, m, n, k, dtype, rng)


@pytest.mark.parametrize(
    "step", [pytest.param(CUDA_LADDER[7], marks=pytest.mark.deep), CUDA_LADDER[8]], ids=lambda step: step.name
)
def test_the_large_tiles(step, multiprocessors):
    """They are chosen where all multiprocessors get one: here there is one."""
    multiprocessors(1)
    rng = np.random.default_rng()
    for m, n, k in [(100, 252, 70), (131, 300, 200)]:
        product_checks.check(step, m, n, k, compiled_large(step), rng)


def compiled_large(step):
    """A dtype for whose large tiles `test_ragged_sizes` has compiled rung 9; bfloat16's code is float16's."""
    return "bfloat16" if step.number == 9 else step.dtypes[0]


# The layouts of a, b and c. A c in columns is one in rows of the transposed product.
LAYOUTS = [
    ("contiguous", "transposed", "contiguous"),
    ("transposed", "contiguous", "contiguous"),
    ("transposed", "transposed", "contiguous"),
    ("embedded", "embedded, transposed", "transposed"),
    ("every second row, every third column", "both reversed", "embedded"),
]


def check_layouts(step, some):
    dtype, sizes = ("float32", (36, 44, 17)) if step.number < 9 else ("float16", (72, 140, 77))
    for seed, layouts in some:
        check_laid_out(step, sizes, dtype, layouts, seed, read_only=seed == 1)


# For rungs that are compiled for each order: with c in columns, two operands in rows take the kernel of two
# that are transposed. Together with contiguous operands each operand then has each order.
TWO_ORDERS = {2: LAYOUTS[2], 3: ("embedded", "embedded", "transposed"), 4: LAYOUTS[4]}


@every_rung
def test_transposed_operands_and_views(step):
    check_layouts(step, TWO_ORDERS.items() if step in BY_LAYOUT else enumerate(LAYOUTS))


@pytest.mark.deep
@pytest.mark.parametrize("step", BY_LAYOUT, ids=lambda step: step.name)
def test_one_transposed_operand(step):
    """For which these rungs are compiled again."""
    check_layouts(step, enumerate(LAYOUTS[:2]))


@pytest.mark.parametrize("across", [True, pytest.param(False, marks=pytest.mark.deep)])
def test_transposed_operands_of_tf32(across):
    """What ldmatrix can't transpose is read word by word, along m and along n; otherwise along k."""
    rng = np.random.default_rng()
    a, b = product_checks.inputs(45, 70, 50, "float32", int(rng.integers(2**32)))
    x, y = (np.asfortranarray(a), b) if across else (a, np.asfortranarray(b))
    product_checks.assert_product(CUDA_LADDER[8].matmul(x, y), a, b, sums="float32", tf32=True)


@pytest.mark.deep
@pytest.mark.parametrize("step", TENSOR_CORES, ids=lambda step: step.name)
def test_sums_of_halves_may_stay_float32(step):
    rng = np.random.default_rng()
    for m, n, k in [(1, 1, 1), (37, 61, 130)]:
        product_checks.check(step, m, n, k, "bfloat16", rng, out_dtype="float32")
    a, b = product_checks.inputs(20, 33, 50, "bfloat16", seed=1)
    out, base = laid_out(np.zeros((20, 33), "float32"), "embedded, transposed")
    product_checks.assert_product(step.matmul(a, b, out=out), a, b, sums="float32")
    out[...] = np.nan
    assert np.isnan(base).all(), "written outside of out"


@every_rung
def test_nan_and_infinity_travel_as_ieee_754_has_it(step):
    """Also next to the edges, beyond which kernels fill up with zeros: 0 times infinity is NaN."""
    dtype = step.dtypes[0]
    rng = np.random.default_rng()
    for m, n, k in [(20, 35, 10), (33, 12, 67)]:
        a, b = product_checks.inputs(m, n, k, dtype, int(rng.integers(2**32)))
        for x in (a, b):
            x[rng.integers(x.shape[0], size=3), rng.integers(x.shape[1], size=3)] = [0, np.inf, np.nan]
        a[m - 1, 0], b[k - 1, n - 1] = np.inf, -np.inf
        a[3], b[4, 5] = 0, np.inf
        check_not_finite(step.matmul, a, b)


@pytest.mark.parametrize("count", [2, 4])
def test_blocks_of_rung_10_take_tile_after_tile(count, multiprocessors, monkeypatch):
    """1 and 2 clusters of 2 blocks, for 9 and 3 tiles: a last round that is not full, and one step of k."""
    multiprocessors(count)
    monkeypatch.setattr(importlib.import_module("minidist.kernels.cuda.s10_hopper"), "COLUMNS", (128,))
    rng = np.random.default_rng()
    for m, n, k in [(513, 260, 5), (600, 100, 450)]:
        product_checks.check(CUDA_LADDER[9], m, n, k, "float16", rng)


@pytest.mark.parametrize("step", CUDA_LADDER[:9], ids=lambda step: step.name)
def test_elements_past_2_to_the_31(step, tmp_path):
    """Rows so far apart that an index of 32 bits is not enough, in a file that takes no space on disk."""
    dtype = step.dtypes[0]
    apart = 2**30 + 64
    path = tmp_path / "sparse"
    memory = np.memmap(path, dtype, "w+", shape=(3, apart))
    try:
        a, b = product_checks.inputs(3, 20, 16, dtype, seed=3)
        memory[:, :16], right = a, np.ascontiguousarray(b[:, :16])
        product_checks.assert_product(step.matmul(memory[:, :16], right), a, right, sums=step.sums(dtype))
        memory[:, :16] = b[:3, :16]
        left = np.ascontiguousarray(a[:, :3])
        product_checks.assert_product(
            step.matmul(left, memory[:, :16]), left, b[:3, :16], sums=step.sums(dtype)
        )
    finally:
        del memory
        path.unlink()


# For 128 x 256 x 64 in rows, with the small tiles of rung 8 and the large ones of rung 9: bytes from global
# memory for each FLOP, and 32-byte sectors for each load of a warp. A step of p takes 4 (rows + columns)
# bytes for 2 rows columns FLOP of a block's tile.
MOVED = {
    1: (16.5, 16.5),
    2: (2.5, 2.5),
    3: (4 / 32, 4),
    4: (4 / 64, 4),
    5: (4 / 128, 4),
    6: (4 / 128, 16),
    7: (4 / 128, (4 * 4 + 16) / 5),  # a by copies of 4 bytes, b of 16
    8: (2 * (1 / 64 + 1 / 128), (4 * 4 + 2 * 16) / 6),
    9: (1 / 128 + 1 / 256, 16),
}
LARGE_8 = (2 * (1 / 128 + 1 / 256), MOVED[8][1])


@pytest.mark.parametrize(
    ("step", "moved"),
    [
        *[pytest.param(step, MOVED.get(step.number), id=step.name) for step in CUDA_LADDER],
        pytest.param(CUDA_LADDER[7], LARGE_8, id="s8_warp_tile-large", marks=pytest.mark.deep),
    ],
)
def test_what_a_rung_moves_and_that_no_banks_conflict(step, moved, multiprocessors):
    if step.number == 9 or moved is LARGE_8:
        multiprocessors(1)
    m, n, k = 128, 256, 64
    a, b = product_checks.inputs(m, n, k, compiled_large(step), seed=0)
    with profiled() as counts:
        step.matmul(a, b)
    assert counts.shared_conflicts == 0
    total, flops = counts.total, product_checks.flops(m, n, k)
    if step.number < 10:
        of_each_flop, sectors = moved
        assert 32 * total.load_sectors / flops == pytest.approx(of_each_flop, rel=1e-9)
        assert counts.sectors_per_load == pytest.approx(sectors, rel=1e-9)
    else:  # four blocks load 128 x 64 and 64 x 128; two of them, of rows past the last, load zeros
        assert counts.counts.copied_bytes == 4 * 2 * k * (128 + 128)
    if step.number >= 9:
        assert counts.counts.matrix_flops >= flops
        assert total.matrix > 0


@every_rung
def test_the_emulator_is_fast_enough_for_tests_and_lessons(step, large_tiles):
    """128 cubed in 200,000 calls of functions, some 0.1 s; a call for each thread would make it millions."""
    tasks = [(128, step.dtypes[0])]
    if step in TENSOR_CORES:
        tasks.append((256, "bfloat16"))
    for n, dtype in tasks:
        if dtype == "bfloat16":
            large_tiles(step)  # which `test_ragged_sizes` has compiled
        a, b = product_checks.inputs(n, n, n, dtype, seed=n)
        out = np.empty_like(a)
        step.matmul(a, b, out=out)
        events = events_of(functools.partial(step.matmul, a, b, out=out))
        assert events < 400_000, f"{n}: {events // 2} calls"
