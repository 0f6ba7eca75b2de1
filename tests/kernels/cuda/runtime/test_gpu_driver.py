"""The path to a GPU, up to its driver: a fake one takes what a launch passes, and runs it in the emulator."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minidist.kernels.cuda import cuda_rung as rung
from minidist.kernels.cuda.cuda_rung import CudaRung
from minidist.kernels.cuda.runtime import gpu_driver, gpu_launch, matrix
from minidist.kernels.cuda.runtime.gpu_driver import DeviceArray
from minidist.kernels.cuda.runtime.kernel import Kernel, numba_type
from minidist.kernels.cuda.runtime.matrix import TensorMap
from minidist.kernels.cuda.tiling import packing
from minidist.kernels.measure import product_checks
from tests.helpers.products import LAYOUTS, check_laid_out

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")

import cuda.bindings.driver as real
from numba import cuda

from tests.helpers.cuda_kernels import MULTIPLY, STEP, compute, fill, without_gpu  # noqa: F401
from tests.helpers.fake_driver import FakeDriver, install


@pytest.fixture
def there(monkeypatch):
    """A GPU whose driver is a fake: its kernels run in the emulator."""
    driver = FakeDriver()
    install(monkeypatch, driver)
    MULTIPLY._ready.clear()  # kernels that another driver loaded
    gpu_launch._maps.clear()
    yield driver
    MULTIPLY._ready.clear()
    gpu_launch._maps.clear()


def on_gpu(x):
    """A NumPy array as an array on the fake GPU, whose memory is main memory."""
    return DeviceArray(x.ctypes.data, x.dtype.name, x.shape, x.strides, x)


def test_arguments_are_laid_out_as_numba_lays_them_out():
    """By what numba-cuda's own launch makes of a device array."""
    from numba.cuda.dispatcher import _Kernel

    class Layout:
        def __init__(self, x):
            self.strides_in_bytes, self.is_contiguous_c, self.is_contiguous_f = x.strides, True, False

    for x in (np.zeros(6, "f4"), np.zeros((3, 4), "f8")[:, ::2]):
        theirs = []
        there = SimpleNamespace(size=x.size, dtype=x.dtype, ptr=4096, shape=x.shape, _layout=Layout(x))
        hint = SimpleNamespace(to_device=lambda *rest, there=there: there)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[_Kernel.__module__], "wrap_arg", lambda x, hint=hint: hint)
            _Kernel._prepare_args(
                SimpleNamespace(extensions=[]), numba_type(x.dtype.name, x.ndim), x, 0, [], theirs
            )
        assert DeviceArray(4096, x.dtype.name, x.shape, x.strides).words == tuple(theirs)


def test_numpy_arrays_are_multiplied_on_a_gpu_and_its_memory_is_given_back(there):
    for layout in LAYOUTS:
        check_laid_out(STEP, (5, 6, 4), "float64", [layout] * 3, seed=1)
        check_laid_out(STEP, (1, 6, 1), "float32", [layout] * 3, seed=2)
    assert not there.memory
    assert there.calls.count("cuLibraryLoadData") <= 2  # by dtype
    tensor = torch.randn(5, 6)
    torch.testing.assert_close(STEP.matmul(tensor, tensor.T), tensor @ tensor.T)
    there.pools = 0
    product_checks.check(
        CudaRung(1, "s1", "cuda", "", ("float32",), compute), 3, 4, 5, "float32", np.random.default_rng()
    )
    assert not there.memory


def test_tensors_on_a_gpu_are_used_in_place_and_nothing_waits(there):
    """The fake's memory is main memory, so that torch's tensors there stand for those on a GPU."""
    a, b = torch.randn(5, 8)[:, ::2], torch.randn(7, 4).T
    out = torch.full((8, 5), torch.nan).T[:, :7]
    STEP._fill_tensors(torch, a, b, out)
    torch.testing.assert_close(out, a @ b)
    there.calls.clear()
    STEP._fill_tensors(torch, a, b, out)
    assert there.calls == ["cuLaunchKernel"]
    assert there.launches[-1] == ((1, 5, 1), 32, 0, 1, 0)
    row = torch.randn(1, 4).expand(5, 4)
    STEP._fill_tensors(torch, row, b, out)
    torch.testing.assert_close(out, row @ b)


def test_packing_on_a_gpu_is_a_kernel(there):
    x = np.arange(35.0).reshape(5, 7)
    data = DeviceArray(x.ctypes.data, "float64", (35,), (8,), x)
    p = packing.packed(matrix.Matrix(data, 5, 7, 7, 1, "float64"), 8)
    assert there.calls.count("cuLaunchKernel") == 1
    assert (p.row_stride, p.address % 64) == (8, 0)
    back = np.zeros((7, 5))
    into = DeviceArray(back.ctypes.data, "float64", (35,), (8,), back)
    packing.copy_back(p, matrix.Matrix(into, 5, 7, 1, 5, "float64"))
    np.testing.assert_array_equal(back, x.T)


def test_a_launch_passes_grid_shared_memory_cluster_and_stream(there):
    x = np.zeros(100, "f4")
    kernel = Kernel(fill, threads=32)
    kernel.launch((4,), on_gpu(x), 7, shared=128)
    np.testing.assert_array_equal(x, 7)
    assert "cuKernelSetAttribute" not in there.calls
    kernel.launch((4,), on_gpu(x), 8, shared=60000, stream=5)
    kernel.launch((4,), on_gpu(x), 9, shared=50000)  # within what was allowed before
    assert there.calls.count("cuKernelSetAttribute") == 1
    assert list(there.shared.values()) == [60000]
    for n in (1, 2):
        kernel.launch((4, 1), on_gpu(x), n, shared=128, cluster=2, stream=6)
    np.testing.assert_array_equal(x, 2)
    launches = [((4, 1, 1), 32, 128, 1, 0), ((4, 1, 1), 32, 60000, 1, 5), ((4, 1, 1), 32, 50000, 1, 0)]
    assert there.launches == [*launches, *[((4, 1, 1), 32, 128, 2, 6)] * 2]
    assert there.calls.count("cuLibraryLoadData") == 1


def test_a_launch_that_can_not_be_is_refused(there):
    x = on_gpu(np.zeros(100, "f4"))
    kernel = Kernel(fill, threads=32)
    with pytest.raises(ValueError, match=r"300000 bytes of dynamic shared memory.*NVIDIA Fake has 232448"):
        kernel.launch((4,), x, 1, shared=300000)
    with pytest.raises(ValueError, match=r"cluster is 3 and the grid is \(4, 1, 1\)"):
        kernel.launch((4,), x, 1, shared=128, cluster=3)
    with pytest.raises(ValueError, match=r"of fill does not fit int32"):
        kernel.launch((4,), x, 2**40, shared=128)
    with pytest.raises(TypeError, match="argument 1 of fill is a float"):
        kernel.launch((4,), x, 1.5)
    there.fails["cuLaunchKernel"] = real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(ValueError, match=r"the grid of fill is \(4, 70000, 1\).*65535"):
        kernel.launch((4, 70000), x, 1)
    with pytest.raises(RuntimeError, match=r"the launch of fill.*CUDA_ERROR_INVALID_VALUE.*what went wrong"):
        kernel.launch((4,), x, 1)
    there.fails = {"cuMemAllocAsync": real.CUresult.CUDA_ERROR_OUT_OF_MEMORY}
    with pytest.raises(RuntimeError, match=r"cuMemAllocAsync.*free arrays"):
        packing.scratch(4, 4, "float32", 4)


def test_main_memory_stays_while_a_copy_to_the_gpu_may_still_read_it(there, monkeypatch):
    read = []
    monkeypatch.setattr(FakeDriver, "_cuMemcpyHtoDAsync", lambda self, into, host, *rest: read.append(host))
    uploaded = rung.uploaded(np.ones((4, 8), "f4")[:, ::2], "float32")
    assert [uploaded.data.owner[1].ctypes.data] == read


def test_machine_code_that_a_driver_does_not_take_is_an_error_with_a_remedy(there):
    there.fails["cuLibraryLoadData"] = real.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(RuntimeError, match=r"cuLibraryLoadData.*update it, or pip.*nvidia-nvjitlink==13\.0"):
        Kernel(fill, threads=32).launch((4,), on_gpu(np.zeros(100, "f4")), 1, shared=128)


def test_a_gpu_that_is_too_old_for_a_kernel_is_named(monkeypatch):
    install(monkeypatch, FakeDriver(capability=(8, 0)))
    x = np.zeros(4, "f4")
    with pytest.raises(
        RuntimeError, match=r"kernel fill uses.*9\.0.*NVIDIA Fake has compute capability 8\.0"
    ):
        Kernel(fill, threads=32, architecture="sm_90a").launch((1,), on_gpu(x), 1, shared=128)
    hopper = CudaRung(10, "s10", "cuda", "", ("float32",), compute, architecture="sm_90a")
    with pytest.raises(RuntimeError, match=r"rung s10 uses.*NVIDIA Fake has compute capability 8\.0"):
        hopper.matmul(np.ones((2, 2), "f4"), np.ones((2, 2), "f4"))
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"CUDA 12\.4.*toolkit is CUDA 13"):
        install(monkeypatch, FakeDriver(version=12040))


def test_properties_of_a_gpu(there):
    found = gpu_driver.get().here()
    assert (found.name, found.capability, found.multiprocessors) == ("NVIDIA Fake", (9, 0), 132)
    assert (found.driver, found.l2) == ("13.0", 50 << 20)
    assert gpu_driver.multiprocessors() == 132


def read_map(map_, n):
    if cuda.threadIdx.x < n:
        map_[0] = 0


def test_a_tensor_map_is_encoded_once_and_found_again(there, monkeypatch):
    monkeypatch.setattr(gpu_launch, "KEPT", 3)
    x = np.zeros((6, 16), "u2")
    launched = []
    monkeypatch.setattr(FakeDriver, "_run", lambda self, *given: launched.append(given))
    kernel = Kernel(read_map, threads=32)
    data = on_gpu(x.reshape(-1))
    for _ in range(3):
        kernel.launch((1,), TensorMap(data, 6, 10, 16, 4, 8, "bfloat16", 32), 1)
    assert there.calls.count("cuTensorMapEncodeTiled") == 1
    assert there.calls.count("cuMemsetD32Async") == 32
    made = there.maps[1]
    assert (made.rows, made.columns, made.pitch) == (6, 10, 16)
    assert (made.box_rows, made.box_columns, made.dtype, made.swizzle) == (4, 8, "bfloat16", 32)
    assert made.array.ctypes.data == x.ctypes.data
    for rows in (1, 2, 3, 4, 5):
        kernel.launch((1,), TensorMap(data, rows, 10, 16, 4, 8, "float16", 0), 1, stream=3)
    assert len(gpu_launch._maps) == 3
    assert len(there.memory) == 3
    assert len(launched) == 8
    # What a graph records is done when it is replayed, and its memory is its own.
    monkeypatch.setattr(gpu_launch, "_capturing", lambda: True)
    kernel.launch((1,), TensorMap(data, 6, 9, 16, 4, 8, "float16", 0), 1, stream=3)
    kernel.launch((1,), TensorMap(data, 5, 10, 16, 4, 8, "float16", 0), 1, stream=3)
    assert there.calls.count("cuTensorMapEncodeTiled") == 8  # one that was kept is not the graph's
    assert len(gpu_launch._maps) == 3
    assert len(there.memory) == 3
