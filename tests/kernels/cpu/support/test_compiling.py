"""When a kernel is compiled, and when its machine code is taken from disk."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from minidist import kernels
from minidist.kernels import rung
from minidist.kernels.cpu import s8_matrix_unit
from minidist.kernels.cpu.support import bf16_instructions
from minidist.kernels.cpu.support.compiling import compiled
from minidist.kernels.measure import cpu_peaks
from tests.helpers.fresh_python import output_of


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
    njit = numba.njit

    def record(*args, **options):
        if options:  # without any, a module of Numba's own that it imports late
            started.append(options)
        return njit(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba, "njit", record)
        for dtype in ("float32", "float32", "float64", "float64"):
            call(dtype)
    assert traced == [2, 2, 2, 2]
    assert started == [{"cache": True}, {"cache": True}]


def test_machine_code_of_another_machine_is_not_taken():
    """Numba tells CPUs and their features apart; the name of rung 8's code tells what this machine grants."""
    from numba import float32, njit
    from numba.core.registry import cpu_target

    names = []

    class Code:
        def __init__(self, function):
            names.append(function.__qualname__)

        def compile(self, signature):
            pass

        disable_compile = __call__ = lambda self, *arguments: None

    with pytest.MonkeyPatch.context() as patch:
        # What rungs use is compiled as ever: it may be imported here first.
        patch.setattr("numba.njit", lambda *f, **how: Code if how.get("cache") else njit(*f, **how))
        for unit in ("AMX", "AVX512_BF16", "AMX"):
            compiled("A", variant=lambda unit=unit: unit)(lambda a: None)(np.ones((1, 1)))
        s8_matrix_unit._work(np.ones((1, 1), np.int16), 0, 0, 0)  # a dtype that it is never compiled for
    assert names[0] == names[2] != names[1]
    assert names[3].endswith(f"_{bf16_instructions.matrix_unit()}")
    index = njit(cache=True)(kernels.rung)._cache._index_key((float32,), cpu_target.target_context.codegen())
    assert cpu_target.target_context.codegen().magic_tuple() in index


def test_without_a_folder_to_write_to_a_kernel_is_compiled_all_the_same():
    names = {}
    # A function that no file holds: Numba finds no place for its machine code.
    exec("def kernel(a, b, out):\n    out[0, 0] = a[0, 0] * b[0, 0]", names)
    out = np.zeros((1, 1))
    compiled("AAA")(names["kernel"])(np.full((1, 1), 3.0), np.full((1, 1), 4.0), out)
    assert out[0, 0] == 12


def test_a_variable_that_keeps_numba_from_compiling_is_named(monkeypatch):
    """Planted: rung 3 raised AttributeError, 'function' object has no attribute 'compile'."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    one = np.ones((1, 1))
    with pytest.raises(RuntimeError, match=r"NUMBA_DISABLE_JIT is set, .* unset"):
        compiled("AAA")(lambda a, b, out: None)(one, one, one)
    with pytest.raises(RuntimeError, match=r"NUMBA_DISABLE_JIT is set, .* unset"):
        cpu_peaks.roofs()
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "0")
    rung("s3_compiled").matmul(one, one)


KERNEL = """
from .compiling import compiled

@compiled("AAA", uses=("factor",))
def kernel(a, b, out, more):
    out[0, 0] = factor.times(a[0, 0] * b[0, 0]) + more
"""
FACTOR = """
from numba import njit

@njit
def times(x):
    return FACTOR * x
"""
PRODUCT = """
import numpy as np, numba.core.event as event
from copied.cpu.support.product import kernel
out = np.zeros((1, 1))
with event.install_recorder("numba:compile") as compilations:
    kernel(np.full((1, 1), 5.0), np.full((1, 1), 7.0), out, 1)
print(len(compilations.buffer) > 0, int(out[0, 0]))
"""


@pytest.mark.deep
def test_machine_code_is_kept_until_a_file_that_it_was_made_of_changes(tmp_path):
    """In a copy of the package, with a kernel that uses a function of another file."""
    folder = tmp_path / "copied"
    shutil.copytree(Path(kernels.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "cpu" / "support" / "product.py").write_text(KERNEL)

    def product(factor):
        """By another process: whether it compiled, and the result."""
        (folder / "cpu" / "support" / "factor.py").write_text(FACTOR.replace("FACTOR", factor))
        folders = {"NUMBA_CACHE_DIR": str(tmp_path / "codes"), "PYTHONPATH": str(tmp_path)}
        compiled, result = output_of(PRODUCT, PYTHONDONTWRITEBYTECODE="1", **folders).split()
        return compiled == "True", int(result)

    assert product("2") == (True, 71)
    assert product("2") == (False, 71)
    assert product("3") == (True, 106)
