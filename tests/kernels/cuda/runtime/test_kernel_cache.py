"""The cache of compiled kernels: what it finds again, and what it must not take for something else."""

import os
import subprocess
import sys

import pytest

from minidist.kernels.cuda.runtime import compiler
from minidist.kernels.cuda.runtime import kernel_cache as cache
from minidist.kernels.cuda.runtime.kernel import Kernel
from minidist.kernels.cuda.tiling import packing

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")

from numba import cuda

from minidist.kernels.cuda import s1_naive as rung_file
from tests.helpers.clocks import HANG
from tests.helpers.cuda_kernels import MULTIPLY, TYPES, own_cache, scaled, without_gpu  # noqa: F401


def counted(monkeypatch):
    calls = []
    compile_now = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda *given: calls.append(given) or compile_now(*given))
    return calls


def test_what_was_compiled_is_found_again_and_what_is_damaged_is_not(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIDIST_CACHE_DIR", str(tmp_path))
    calls = counted(monkeypatch)
    made = [Kernel(scaled(3), threads=32).compile(TYPES, "sm_80") for _ in range(4)]
    ptx, cubin, report = made[0].ptx, made[0].cubin, made[0].report
    assert len(calls) == 2
    assert (made[1].ptx, made[1].cubin, made[1].report) == (ptx, cubin, report)
    assert len(calls) == 2
    files = list((tmp_path / "kernels").iterdir())
    assert len(files) == 2
    files[0].write_bytes(files[0].read_bytes()[:-1])
    files[1].write_bytes(b"")
    assert ".target sm_80" in made[2].ptx
    assert made[2].report.registers == report.registers
    assert len(calls) == 4
    assert made[3].report == made[2].report
    assert len(calls) == 4


def intrinsic_with(constant):
    from llvmlite import ir
    from numba.cuda.extending import intrinsic
    from numba.cuda.typing import signature

    @intrinsic
    def add(context, x):
        def lower(context, builder, signature, arguments):
            return builder.fadd(arguments[0], ir.Constant(ir.FloatType(), constant))

        return signature(cuda.types.float32, x), lower

    def kernel(x, n):
        x[n] = add(x[n])

    return kernel


def calling(helper):
    def kernel(x, n):
        x[n] = helper(x[n])

    return kernel


def test_names_in_the_cache_differ_by_all_that_code_depends_on():
    one, two = cuda.jit(device=True)(lambda x: x + 1), cuda.jit(device=True)(lambda x: x + 2)
    functions = [MULTIPLY.function, scaled(2), scaled(3), scaled(2.0)]
    functions += [intrinsic_with(1.0), intrinsic_with(2.0), calling(one), calling(two)]
    names = [cache.key(function, "ptx") for function in functions]
    names += [cache.key(MULTIPLY.function, "cubin"), cache.key(MULTIPLY.function, "ptx", "sm_80")]
    assert None not in names
    assert len(set(names)) == len(names)
    assert cache.key(scaled(2), "ptx") == names[1]
    assert cache.key(intrinsic_with(1.0), "ptx") == names[4]


def test_kernels_of_the_project_are_kept():
    for dtype in ("uint16", "float32"):
        assert cache.key(packing.kernel(dtype).function) is not None
    assert cache.key(rung_file.KERNEL.function) is not None


def test_what_has_no_checksum_is_not_kept():
    typed = "def kernel(x, n):\n    x[n] = 0\n"
    scope = {}
    exec(compile(typed, "<a notebook>", "exec"), scope)
    assert cache.key(scope["kernel"]) is None
    assert cache.key(scaled(object())) is None
    assert cache.key(scaled({1: 2})) is None
    assert cache.key(calling(subprocess)) is None  # a module whose functions may change
    assert not cache.save(None, b"")
    assert cache.load(None) is None


def test_the_cache_forgets_what_is_old(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIDIST_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "MOST", 10)
    for i in range(25):
        assert cache.save(f"{i:02}", b"x")
        assert cache.load(f"{i:02}") == b"x"
    assert len(list((tmp_path / "kernels").iterdir())) <= 10


def test_a_folder_that_can_not_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MINIDIST_CACHE_DIR", str(tmp_path / "file"))
    assert not cache.save("name", b"x")
    assert ".target sm_75" in Kernel(scaled(5), threads=32).compile(TYPES, "sm_75").ptx


def test_several_processes_share_the_cache(tmp_path):
    program = """
import sys
from minidist.kernels.cuda.runtime import kernel_cache as cache
for _ in range(200):
    cache.save("name", bytes([int(sys.argv[1])]) * 5000)
    assert len(set(cache.load("name"))) == 1
"""
    environment = {**os.environ, "MINIDIST_CACHE_DIR": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", program, number], env=environment) for number in ("1", "2")
    ]
    assert [process.wait(HANG) for process in started] == [0, 0]
    assert len(list((tmp_path / "kernels").iterdir())) == 1
