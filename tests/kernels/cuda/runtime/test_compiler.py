"""Compiling for any architecture without a GPU, and what the assembler's report says."""

import pytest

from minidist.kernels.cuda.runtime import compiler
from minidist.kernels.cuda.runtime.compiler import Report, parse
from minidist.kernels.cuda.runtime.kernel import Kernel

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")

from numba import cuda, float32, int32, uint32

from tests.helpers.cuda_kernels import TYPES, own_cache, without_gpu  # noqa: F401


def everything(x, n):
    """Uses what takes more than NVVM: max and exp, shuffles, a view, a function that is compiled apart."""
    tile = cuda.shared.array(64, float32)
    words = tile.view(uint32)
    i = int32(cuda.threadIdx.x)
    tile[i] = twice(max(x[i], float32(0)))
    cuda.syncthreads()
    if i < n:
        x[i] = cuda.shfl_xor_sync(0xFFFFFFFF, tile[i], 1) + float32(words[0])


@cuda.jit(device=True)
def twice(x):
    return x + x


@pytest.mark.parametrize(
    "architecture",
    # Always the oldest, the one with instructions that no other has, and the newest.
    [
        *("sm_75", "sm_90a", "sm_120"),
        *(pytest.param(between, marks=pytest.mark.deep) for between in ("sm_80", "sm_89", "sm_100")),
    ],
)
def test_a_kernel_compiles_for_any_architecture_without_a_gpu(architecture):
    kernel = Kernel(everything, threads=64, blocks=4)
    compiled = kernel.compile(TYPES, architecture)
    assert f".target {architecture}" in compiled.ptx
    assert ".maxntid 64" in compiled.ptx
    assert ".minnctapersm 4" in compiled.ptx
    assert ".loc" in compiled.ptx
    report = compiled.report
    assert report.architecture == architecture
    assert (report.shared, report.spill_stores, report.spill_loads, report.stack) == (256, 0, 0, 0)
    assert 8 <= report.registers <= 32
    assert report.entry.encode() in compiled.cubin
    assert kernel.compile(TYPES, architecture) is compiled


def test_bounds_of_a_launch_cap_the_registers():
    def long(x, n):
        total = float32(0)
        for i in range(64):
            total += x[i] * x[i + n]
        x[0] = total

    few = Kernel(long, threads=1024, blocks=1).compile(TYPES, "sm_90").report
    assert few.registers <= 64


def test_an_architecture_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"architecture is 'hopper'.*sm_80"):
        Kernel(everything, threads=32, architecture="hopper")
    with pytest.raises(ValueError, match="threads is 2000"):
        Kernel(everything, threads=2000)
    with pytest.raises(RuntimeError, match=r"nvJitLink can't assemble kernel for sm_75"):
        compiler.link(b"no code", "sm_75", "kernel")


def test_the_current_device_is_asked_for_again_after_compiling():
    from numba.cuda import api, dispatcher

    Kernel(everything, threads=32).compile(TYPES, "sm_86").ptx  # noqa: B018
    assert dispatcher.get_current_device is api.get_current_device


def test_a_report_is_read_from_the_log():
    log = (
        "ptxas warning : (C7504) Potential Performance Loss\n"
        "ptxas info    : Compiling entry function '_Z1k' for 'sm_90'\n"
        "ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 256 bytes smem, 360 bytes cmem[0]\n"
    )
    expected = Report("sm_90", 40, 8, 12, 16, 256, ("(C7504) Potential Performance Loss",), "_Z1k")
    assert parse(log, "sm_90") == expected
    with pytest.raises(ValueError, match="registers"):
        parse("nothing", "sm_90")
