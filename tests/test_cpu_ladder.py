"""Every rung of the CPU's ladder, with any sizes, strides and dtypes; and what makes it a ladder."""

import importlib
import inspect
import itertools
import os
import statistics
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from minidist.kernels import CPU_LADDER, cpu, harness
from minidist.kernels.cpu.compiled import compiled

# The others go past a vector and past a block.
LARGEST = {"s1_python_loops": 17, "s2_vectors": 17}
FIRST_FOUR = CPU_LADDER[:4]

every_rung = pytest.mark.parametrize("step", CPU_LADDER, ids=lambda step: step.name)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])


# Ways for an (m, n) matrix to lie in memory: the shape of the array around it, and the view of that array.
def embedded(m, n):
    return (m + 3, n + 2), lambda base: base[1 : m + 1, 1 : n + 1]


LAYOUTS = {
    "contiguous": lambda m, n: ((m, n), lambda base: base),
    "transposed": lambda m, n: ((n, m), lambda base: base.T),
    "embedded": embedded,
    "embedded, transposed": lambda m, n: (embedded(n, m)[0], lambda base: embedded(n, m)[1](base).T),
    "columns reversed": lambda m, n: (embedded(m, n)[0], lambda base: embedded(m, n)[1](base)[:, ::-1]),
    "both reversed": lambda m, n: (embedded(m, n)[0], lambda base: embedded(m, n)[1](base)[::-1, ::-1]),
    "every second row, every third column": lambda m, n: (
        (2 * m + 1, 3 * n + 2),
        lambda base: base[1::2, 2::3][:m, :n],
    ),
}


def laid_out(x, layout):
    """A view with x's values, laid out so, inside of an array of which all else is NaN; and that array."""
    shape, view = LAYOUTS[layout](*x.shape)
    base = np.full(shape, np.nan, x.dtype)
    view(base)[...] = x
    return view(base), base


@every_rung
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_size_any_strides_any_dtype(step, data):
    sizes = st.integers(0, LARGEST.get(step.name, 90))
    m, n, k = data.draw(sizes), data.draw(sizes), data.draw(sizes)
    dtype = data.draw(st.sampled_from(step.dtypes))
    layouts = [data.draw(st.sampled_from(list(LAYOUTS))) for _ in range(3)]
    a, b = harness.inputs(m, n, k, dtype, data.draw(st.integers(0, 2**32)))
    a_view, a_base = laid_out(a, layouts[0])
    b_view, b_base = laid_out(b, layouts[1])
    out, out_base = laid_out(np.full((m, n), 7, dtype), layouts[2])
    inputs_before = a_base.copy(), b_base.copy()
    a_base.flags.writeable = data.draw(st.booleans())

    assert step.matmul(a_view, b_view, out=out) is out

    harness.assert_product(out, a, b, f"{step.name} {m} {n} {k} {dtype} {layouts}")
    np.testing.assert_array_equal(a_base, inputs_before[0])
    np.testing.assert_array_equal(b_base, inputs_before[1])
    # What surrounds out is NaN still: nothing was written outside of it.
    out[...] = np.nan
    assert np.isnan(out_base).all()
    np.testing.assert_array_equal(step.matmul(a_view, b_view), step.matmul(a, b))


@every_rung
@every_dtype
def test_check_passes_at_ragged_sizes(step, dtype):
    rng = np.random.default_rng()
    for m, n, k in harness.shapes(rng, 12, LARGEST.get(step.name, 200)):
        harness.check(step, m, n, k, dtype, rng)


@every_rung
@every_dtype
def test_nan_and_infinity_travel_as_in_blas(step, dtype):
    rng = np.random.default_rng()
    a, b = harness.inputs(12, 13, 11, dtype, int(rng.integers(2**32)))
    for x in (a, b):
        x[rng.integers(x.shape[0], size=6), rng.integers(x.shape[1], size=6)] = [
            0,
            0,
            0,
            np.inf,
            -np.inf,
            np.nan,
        ]
    a[3], b[4, 5] = 0, np.inf  # 0 * inf is NaN: a kernel that skips zeros would miss it
    with np.errstate(invalid="ignore"):
        expected = np.matmul(a, b)
    assert np.isnan(expected[3, 5])
    c = step.matmul(a, b)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(c[~finite], expected[~finite])
    assert np.isfinite(c[finite]).all()


@every_rung
def test_overflow_is_infinity_without_a_warning(step):
    a, b = np.full((2, 3), 3e38, "float32"), np.full((3, 2), 3e38, "float32")
    np.testing.assert_array_equal(step.matmul(a, b), np.full((2, 2), np.inf, "float32"))


@every_dtype
def test_the_first_four_rungs_agree_to_the_last_bit(dtype):
    """They add the same products in the same order and dtype: only who does it, and when, differs."""
    rng = np.random.default_rng()
    for m, n, k in [(1, 1, 1), (13, 40, 37), (5, 3, 64)]:
        a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
        results = [step.matmul(a, b) for step in FIRST_FOUR]
        for c in results:
            np.testing.assert_array_equal(c, results[0])


def test_each_of_the_first_four_is_faster_than_the_one_before():
    """By 1.5 at least. Measured at 250 x 250 x 250 it is 8 and more: a busy machine does not fail this."""
    a, b = harness.inputs(96, 96, 96, "float32", 0)
    seconds = harness.time_in_turns(
        {step.name: lambda s=step: s.matmul(a, b) for step in FIRST_FOUR}, rounds=5
    )
    medians = [statistics.median(times) for times in seconds.values()]
    for slower, faster in itertools.pairwise(medians):
        assert slower > 1.5 * faster, medians


def test_the_ladder_holds_every_rung_file_in_order():
    files = sorted(path.stem for path in Path(cpu.__file__).parent.glob("s[0-9]*.py"))
    assert sorted(step.name for step in CPU_LADDER) == files
    assert [step.number for step in CPU_LADDER] == list(range(1, len(CPU_LADDER) + 1))
    for step in CPU_LADDER:
        assert step.name.startswith(f"s{step.number}_")
        assert step.device == "cpu"
        assert step.idea.endswith(".")
        module = importlib.import_module(f"minidist.kernels.cpu.{step.name}")
        assert module.RUNG is step
        assert "Measured: " in inspect.getdoc(module)


def test_each_dtype_is_compiled_at_its_first_call_only():
    traced = []

    @compiled("ACC")
    def kernel(a, b, out):
        out[0, 0] = a[0, 0] + b[0, 0]

    def call(dtype):
        out = np.zeros((1, 1), dtype)
        kernel(np.ones((1, 1), dtype), np.ones((1, 1), dtype), out)
        traced.append(out[0, 0])

    import numba

    started = []
    with pytest.MonkeyPatch.context() as patch:
        njit = numba.njit
        patch.setattr(
            numba, "njit", lambda *args, **options: started.append(options) or njit(*args, **options)
        )
        for dtype in ("float32", "float32", "float64", "float64"):
            call(dtype)
    assert traced == [2, 2, 2, 2]
    assert started == [{"cache": True}, {"cache": True}]


def test_without_a_folder_to_write_to_a_kernel_is_compiled_all_the_same():
    names = {}
    # A function that no file holds: Numba finds no place for its machine code.
    exec("def kernel(a, b, out):\n    out[0, 0] = a[0, 0] * b[0, 0]", names)
    out = np.zeros((1, 1))
    compiled("AAA")(names["kernel"])(np.full((1, 1), 3.0), np.full((1, 1), 4.0), out)
    assert out[0, 0] == 12


def test_machine_code_is_kept_for_the_next_process(tmp_path):
    code = (
        "import numpy as np; from minidist.kernels import rung; import numba.core.event as event\n"
        "with event.install_recorder('numba:compile') as compilations:\n"
        "    rung(4).matmul(np.ones((2, 2)), np.ones((2, 2)))\n"
        "print(len(compilations.buffer))"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (
        int(
            subprocess.run(
                [sys.executable, "-c", code],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            ).stdout
        )
        for _ in range(2)
    )
    assert first > 0
    assert second == 0
