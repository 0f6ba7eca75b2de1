"""Products as the tests of rungs check them: any strides and caches, and guards around the result."""

import contextlib
import importlib
import inspect
from pathlib import Path

import numpy as np
import pytest

from minidist.kernels.cpu.support import bf16_instructions, block_sizes, one_thread
from minidist.kernels.cpu.support.caches import Caches
from minidist.kernels.measure import product_checks

KIB, MIB = 2**10, 2**20
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])
every_cache = pytest.mark.parametrize(
    ("l2", "l3"),
    [(256 * KIB, 4 * MIB), (512 * KIB, 0), (MIB, 32 * MIB), (2 * MIB, 512 * MIB), (4 * MIB, 16 * MIB)],
)


def runs_here(step):
    """Whether this CPU has the instructions of a rung of the CPU ladder."""
    return "bfloat16" not in step.dtypes or bool(bf16_instructions.matrix_unit())


def skip_unless_it_runs(step):
    """Skip a test of a rung that this CPU can't run."""
    if not runs_here(step):
        pytest.skip(bf16_instructions.NONE)


@contextlib.contextmanager
def with_caches(l2, l3):
    """A context in which products are cut for caches of so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sizes, "caches", lambda: Caches(l2=l2, l3=l3))
        patch.setattr(one_thread, "_kept", one_thread.KeptByThread())
        block_sizes.blocks.cache_clear()
        yield
    block_sizes.blocks.cache_clear()


def check_ladder(package, ladder, said):
    """Fail unless the ladder has all rungs of the package in order, each in a file that says so."""
    files = sorted(path.stem for path in Path(package.__file__).parent.glob("s[0-9]*.py"))
    assert sorted(step.name for step in ladder) == files
    assert [step.number for step in ladder] == list(range(1, len(ladder) + 1))
    for step in ladder:
        assert step.name.startswith(f"s{step.number}_")
        assert step.device in package.__name__.split(".")
        assert step.idea.endswith(".")
        module = importlib.import_module(f"{package.__name__}.{step.name}")
        assert module.RUNG is step
        assert said(step) in inspect.getdoc(module)


# Ways for an (m, n) matrix to lie in memory: the shape of the array around it, and the view of that array.
def embedded(m, n):
    return (m + 3, n + 2), lambda base: base[1 : m + 1, 1 : n + 1]


FEW = 8  # rows or columns at most, of products of rungs 6 and 7 whose sums follow the order of the matrix

LAYOUTS = {
    "contiguous": lambda m, n: ((m, n), lambda base: base),
    "transposed": lambda m, n: ((n, m), lambda base: base.T),
    "embedded": embedded,
    "embedded, transposed": lambda m, n: (embedded(n, m)[0], lambda base: embedded(n, m)[1](base).T),
    "columns reversed": lambda m, n: (embedded(m, n)[0], lambda base: embedded(m, n)[1](base)[:, ::-1]),
    "rows reversed": lambda m, n: (embedded(m, n)[0], lambda base: embedded(m, n)[1](base)[::-1]),
    "both reversed": lambda m, n: (embedded(m, n)[0], lambda base: embedded(m, n)[1](base)[::-1, ::-1]),
    "reversed, transposed": lambda m, n: (
        embedded(n, m)[0],
        lambda base: embedded(n, m)[1](base)[::-1, ::-1].T,
    ),
    "every second row, every third column": lambda m, n: (
        (2 * m + 1, 3 * n + 2),
        lambda base: base[1::2, 2::3][:m, :n],
    ),
}
every_layout = pytest.mark.parametrize("layout", list(LAYOUTS))


def laid_out(x, layout):
    """A view with x's values, laid out so, inside of an array of which all else is NaN; and that array."""
    shape, view = LAYOUTS[layout](*x.shape)
    base = np.full(shape, np.nan, x.dtype)
    view(base)[...] = x
    return view(base), base


def random_laid_out(rng, rows, columns, dtype, layout):
    return laid_out(rng.standard_normal((rows, columns)).astype(dtype), layout)[0]


def check_laid_out(step, sizes, dtype, layouts, seed, read_only=False):
    """Fail unless step multiplies operands laid out so, writes all of out, and nothing else."""
    m, n, k = sizes
    a, b = product_checks.inputs(m, n, k, dtype, seed)
    a_view, a_base = laid_out(a, layouts[0])
    b_view, b_base = laid_out(b, layouts[1])
    out, out_base = laid_out(np.full((m, n), 7, dtype), layouts[2])
    inputs_before = a_base.copy(), b_base.copy()
    a_base.flags.writeable = not read_only

    assert step.matmul(a_view, b_view, out=out) is out

    message = f"{step.name} {sizes} {dtype} {layouts} seed={seed}"
    product_checks.assert_product(out, a, b, message, factors=step.factors)
    np.testing.assert_array_equal(a_base, inputs_before[0])
    np.testing.assert_array_equal(b_base, inputs_before[1])
    # What surrounds out is NaN still: nothing was written outside of it.
    out[...] = np.nan
    assert np.isnan(out_base).all(), "written outside of out"
    again = step.matmul(a_view, b_view)
    if step.number > 5 and min(m, n) <= FEW:
        product_checks.assert_product(again, a, b, "laid out differently", factors=step.factors)
    else:
        np.testing.assert_array_equal(again, step.matmul(a, b))


def check_not_finite(matmul, a, b):
    """Fail unless NaN and infinities are where NumPy's product has them, and nowhere else; return both."""
    kind = np.result_type(a.dtype, "float32")  # halves are added in float32
    with np.errstate(invalid="ignore"):
        expected = np.matmul(a.astype(kind), b.astype(kind))
    c, finite = matmul(a, b), np.isfinite(expected)
    np.testing.assert_array_equal(c[~finite], expected[~finite])
    assert np.isfinite(c[finite]).all()
    return c, expected


GUARD = 64  # elements before and after memory for others to write to


def guarded(elements, dtype):
    """Memory for so many elements, NaN all over, between guards."""
    return np.full((1, GUARD + elements + GUARD), np.nan, dtype)


def assert_guards(memory):
    assert np.isnan(memory[0, :GUARD]).all(), "written before the target"
    assert np.isnan(memory[0, -GUARD:]).all(), "written beyond the target"


@contextlib.contextmanager
def guarded_blocks(module, small, **more):
    """A context in which `module`, a rung, packs into blocks of these sizes, between guards that stay."""
    given = []

    def memory(purpose, kind, elements):
        given.append(guarded(elements, kind))
        return given[-1][:, GUARD:-GUARD]

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"blocks": lambda kind: small, "memory": memory, **more}.items():
            patch.setattr(module, name, value)
        yield given
    for each in given:
        assert_guards(each)
