"""The choice of a vector unit, and rung 6 compiled for the units that this machine does not choose itself."""

import os
import platform
import subprocess
import sys

import pytest

from minidist.kernels.cpu.support import vector_unit
from tests.helpers.clocks import HANG
from tests.helpers.fresh_python import output_of

X86 = "x86_64-unknown-linux-gnu"


@pytest.mark.parametrize(
    ("triple", "features", "unit"),
    [
        (X86, "+sse4.2,+avx,+avx2,+fma,+avx512f,+avx512vl", vector_unit.AVX512),
        (X86, "+sse4.2,+avx,+avx2,+fma,-avx512f", vector_unit.AVX2),
        (X86, "+avx2,-fma", vector_unit.SSE),
        (X86, "+avx,+fma,-avx2", vector_unit.SSE),
        (X86, "", vector_unit.SSE),
        ("aarch64-unknown-linux-gnu", "+neon,+fp-armv8", vector_unit.NEON),
        ("arm64-apple-darwin23.1.0", "", vector_unit.NEON),
    ],
)
def test_the_widest_unit_is_chosen(triple, features, unit):
    assert vector_unit.choose(triple, features) is unit


def test_lanes_fill_a_register():
    for unit in (vector_unit.AVX512, vector_unit.AVX2, vector_unit.NEON, vector_unit.SSE):
        assert unit.lanes("float32") == 2 * unit.lanes("float64") == unit.register_bytes // 4


SCRIPT = """
import numpy as np
from minidist.kernels import rung
from minidist.kernels.measure import product_checks
from minidist.kernels.cpu.support import block_sizes, register_tile, vector_unit

rng = np.random.default_rng()
for kind in ("float32", "float64"):
    columns = block_sizes.blocks(np.dtype(kind).char).columns
    for m, n, k in product_checks.shapes(rng, 40, 3 * columns + 40):
        product_checks.check(rung(6), m, n, k, kind, rng)
    for m in range(1, register_tile.ROWS + 2):
        for n in (1, columns // 2, columns // 2 + 1, columns - 1, columns, columns + 1):
            product_checks.check(rung(6), m, n, 5, kind, rng)
    a, b = product_checks.inputs(2 * register_tile.ROWS, 2 * columns, 30, kind, 1)
    out = np.empty((2 * columns, 2 * register_tile.ROWS), kind).T
    rung(6).matmul(np.asfortranarray(a), np.asfortranarray(b), out=out)
    product_checks.assert_product(out, a, b)
print(vector_unit.vector_unit().name)
"""
OLDER = {
    "AVX2": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+sse4.2,+avx,+avx2,+fma,+bmi,+bmi2"},
    "SSE": {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
}


@pytest.fixture(scope="module")
def older_machines(tmp_path_factory):
    """A process for each, all at once: they compile for seconds."""
    processes = {}
    for name, settings in OLDER.items():
        folder = str(tmp_path_factory.mktemp(name))
        processes[name] = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, **settings, "NUMBA_CACHE_DIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="AVX2 and SSE are units of x86-64 machines"
)
@pytest.mark.deep
@pytest.mark.parametrize("name", list(OLDER))
def test_rung_6_is_right_with_other_registers(older_machines, name):
    printed, _ = older_machines[name].communicate(timeout=HANG)
    assert older_machines[name].returncode == 0, printed
    assert printed.strip() == name


ELSEWHERE = """
import platform, re, sys
import llvmlite.binding as llvm

llvm.initialize_all_targets(), llvm.initialize_all_asmprinters()
llvm.get_process_triple = llvm.get_default_triple = lambda: "aarch64-unknown-linux-gnu"
platform.machine = lambda: "aarch64"
import numba
import numpy as np
import minidist
from minidist.kernels import rung
from minidist.kernels.cpu.support import vector_unit

njit, written = numba.njit, []

def write_only(*functions, **options):
    if not options.pop("cache", False):
        return njit(*functions, **options)
    def decorate(function):
        kernel = njit(**options)(function)
        class Written:
            def compile(self, types):
                kernel.compile(types)
                written.append(kernel.inspect_asm(kernel.signatures[0]))
            disable_compile = kernel.disable_compile
            def __call__(self, *arguments):
                return 0  # this machine can't run it
        return Written()
    return decorate

numba.njit = write_only
a = np.ones((128, 128), "float32")
for number in map(int, sys.argv[1:]):
    rung(number).matmul(a, a)
for text in written:
    assert ".text" in text and not re.search(r"%[re]?[abcd]x|%[xyz]mm", text), text[:500]
multiplies = sum(bool(re.search(r"\\bf(mla|madd|mul)\\b", text)) for text in written)
print(vector_unit.vector_unit().name, multiplies)
"""


@pytest.mark.deep
@pytest.mark.parametrize("rungs", ["345", "67"])
def test_the_rungs_compile_for_aarch64(rungs):
    """Up to the machine code: what it computes is tested on such a machine alone."""
    cpu = {"NUMBA_CPU_NAME": "neoverse-n1", "NUMBA_CPU_FEATURES": "+neon,+fp-armv8"}
    unit, multiplies = output_of(ELSEWHERE, *rungs, **cpu, NUMBA_NUM_THREADS="2").split()
    assert unit == "NEON"
    assert int(multiplies) >= len(rungs)  # both threads of rung 7 may compile its kernel
