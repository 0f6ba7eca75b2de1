"""A GPU's driver for tests without one: its memory is main memory, and its kernels run in the emulator.

Types and constants are those of the real `cuda.bindings.driver`, so that a wrong name or a value that does
not convert fails here too. What a launch passes is decoded from the parameters' bytes alone, as a GPU would.
"""

import ctypes
import functools
import inspect

import numpy as np

from minidist.kernels.cuda.runtime import compiler, device, gpu_driver
from minidist.kernels.cuda.runtime.matrix import TensorMap
from minidist.kernels.emulator.execution.run_grid import run_kernel

SIZES = {1: np.uint8, 2: np.uint16, 4: np.float32, 8: np.float64}


class FakeDriver:
    """What `Gpu` takes of the driver. `calls` has the names of the functions that were called."""

    def __init__(self, capability=(9, 0), version=13000, pools=1, count=1):
        import cuda.bindings.driver as real

        self.real = real
        self.capability, self.version, self.pools, self.count = capability, version, pools, count
        self.calls, self.launches, self.kernels = [], [], {}
        self.memory, self.maps, self.shared = {}, {}, {}
        self.context, self.fails = 0, {}

    def __getattr__(self, name):
        if not name.startswith("cu") or name.startswith("cuuint"):
            return getattr(self.real, name)  # a type or an enumeration
        assert callable(getattr(self.real, name)), name
        function = getattr(self, f"_{name}")

        @functools.wraps(function)
        def call(*arguments):
            self.calls.append(name)
            if name in self.fails:
                return (self.fails[name],)
            inspect.signature(function).bind(*arguments)
            results = function(*arguments)
            return (self.real.CUresult.CUDA_SUCCESS, *(results or ()))

        return call

    def _cuInit(self, flags):
        assert flags == 0

    def _cuDriverGetVersion(self):
        return (self.version,)

    def _cuDeviceGetCount(self):
        return (self.count,)

    def _cuDeviceGet(self, ordinal):
        return (self.real.CUdevice(ordinal),)

    def _cuDeviceGetName(self, length, handle):
        return (b"NVIDIA Fake".ljust(length, b"\0"),)

    def _cuDeviceTotalMem(self, handle):
        return (1 << 36,)

    def _cuDeviceGetAttribute(self, which, handle):
        name = which.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        return (
            {
                "COMPUTE_CAPABILITY_MAJOR": self.capability[0],
                "COMPUTE_CAPABILITY_MINOR": self.capability[1],
                "MULTIPROCESSOR_COUNT": 132,
                "L2_CACHE_SIZE": 50 << 20,
                "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 * 1024,
                "MEMORY_POOLS_SUPPORTED": self.pools,
            }[name],
        )

    def _cuCtxGetCurrent(self):
        return (self.real.CUcontext(self.context),)

    def _cuDevicePrimaryCtxRetain(self, handle):
        return (self.real.CUcontext(77),)

    def _cuCtxSetCurrent(self, context):
        self.context = int(context)

    def _cuGetErrorString(self, error):
        return (b"what went wrong",)

    def _cuMemAlloc(self, size):
        memory = np.full(size + 256, 0xFF, np.uint8)  # floats are NaN
        address = -(-memory.ctypes.data // 256) * 256
        self.memory[address] = memory
        return (self.real.CUdeviceptr(address),)

    def _cuMemAllocAsync(self, size, stream):
        int(stream)
        return self._cuMemAlloc(size)

    def _cuMemFree(self, address):
        del self.memory[int(address)]

    def _cuMemFreeAsync(self, address, stream):
        int(stream)
        self._cuMemFree(address)

    def _cuMemcpyHtoDAsync(self, there, host, size, stream):
        ctypes.memmove(int(there), host, size)

    def _cuMemcpyDtoHAsync(self, host, there, size, stream):
        ctypes.memmove(host, int(there), size)

    def _cuMemsetD32Async(self, there, word, count, stream):
        ctypes.memmove(int(there), int(word).to_bytes(4, "little") * count, 4 * count)

    def _cuStreamSynchronize(self, stream):
        int(stream)

    def _cuLibraryLoadData(self, code, jit, jit_values, jit_count, options, values, count):
        assert code in self.kernels
        assert (jit, jit_values, jit_count, options, values, count) == ([], [], 0, [], [], 0)
        self._library = code
        return (self.real.CUlibrary(1),)

    def _cuLibraryGetKernel(self, library, name):
        self.kernels[1000 + len(self.kernels)] = self.kernels[self._library]
        return (self.real.CUkernel(999 + len(self.kernels)),)

    def _cuKernelSetAttribute(self, which, value, kernel, device):
        assert which == self.real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        assert isinstance(kernel, self.real.CUkernel)
        assert isinstance(device, self.real.CUdevice)
        self.shared[int(kernel)] = value

    def _cuGetProcAddress(self, symbol, version, flags):
        assert (symbol, version, flags) == (b"cuTensorMapEncodeTiled", 12000, 0)
        arguments = (ctypes.c_void_p, *[ctypes.c_int] * 2, *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4)
        self._encode_tiled = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(self._cuTensorMapEncodeTiled)
        address = ctypes.cast(self._encode_tiled, ctypes.c_void_p).value
        return address, self.real.CUdriverProcAddressQueryResult.CU_GET_PROC_ADDRESS_SUCCESS

    def _cuTensorMapEncodeTiled(self, into, dtype, rank, address, *rest):
        """As C calls it: arrays are addresses."""
        self.calls.append("cuTensorMapEncodeTiled")
        sizes, strides, box, steps, interleave, swizzle, promotion, fill = rest
        columns, rows = (ctypes.c_uint64 * 2).from_address(sizes)
        pitch = ctypes.c_uint64.from_address(strides).value
        box_columns, box_rows = (ctypes.c_uint32 * 2).from_address(box)
        ones = list((ctypes.c_uint32 * 2).from_address(steps))
        if into % 128 or address % 16 or pitch % 16 or (rank, ones, interleave, fill) != (2, [1, 1], 0, 0):
            return int(self.real.CUresult.CUDA_ERROR_INVALID_VALUE)
        assert promotion == self.real.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
        name = self.real.CUtensorMapDataType(dtype).name.removeprefix("CU_TENSOR_MAP_DATA_TYPE_").lower()
        bytes_of_swizzle = self.real.CUtensorMapSwizzle(swizzle).name.rpartition("_")[2].removesuffix("B")
        pitch //= 4 if name == "float32" else 2
        array = _array_at(address, (1 + (rows - 1) * pitch + columns - 1,), np.uint16)
        number = len(self.maps) + 1
        self.maps[number] = TensorMap(
            array,
            *(rows, columns, pitch, box_rows, box_columns, name),
            0 if bytes_of_swizzle == "NONE" else int(bytes_of_swizzle),
        )
        (ctypes.c_uint64 * 16).from_address(into)[:] = [number << 32 | 5] * 16
        return 0

    def _cuLaunchKernel(self, function, x, y, z, bx, by, bz, shared, stream, parameters, extra):
        assert isinstance(function, self.real.CUfunction)
        assert extra == 0
        block = bx if (by, bz) == (1, 1) else (bx, by, bz)
        self._run(int(function), (x, y, z), block, shared, 1, parameters, int(stream))

    def _cuLaunchKernelEx(self, config, function, parameters, extra):
        (dimension,) = config.attrs
        cluster = dimension.value.clusterDim
        assert (config.numAttrs, cluster.y, cluster.z, extra) == (1, 1, 1, 0)
        assert dimension.id == self.real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        assert (config.blockDimY, config.blockDimZ) == (1, 1)
        rest = (config.sharedMemBytes, cluster.x, parameters, int(config.hStream))
        self._run(int(function), grid, config.blockDimX, *rest)

    def _run(self, function, grid, threads, shared, cluster, parameters, stream):
        ptx, static, types = self.kernels[function]
        assert static + shared <= max(48 * 1024, static + self.shared.get(function, 0))
        pointers = iter(range(parameters, parameters + 8 * 200, 8))

        def take(kind):
            at = ctypes.c_void_p.from_address(next(pointers)).value
            assert at % ctypes.sizeof(kind) == 0
            return kind.from_address(at).value

        args = []
        for kind in types:
            if not hasattr(kind, "ndim"):
                number = {"float32": ctypes.c_float, "int64": ctypes.c_int64}.get(str(kind), ctypes.c_int32)
                args.append(take(number))
                continue
            meminfo, parent, size, itemsize, address = (take(ctypes.c_int64) for _ in range(5))
            shape = tuple(take(ctypes.c_int64) for _ in range(kind.ndim))
            strides = tuple(take(ctypes.c_int64) for _ in range(kind.ndim))
            assert (meminfo, parent, size) == (0, 0, int(np.prod(shape)))
            if str(kind.dtype) == "uint8":  # a tensor map
                words = np.frombuffer((ctypes.c_char * 128).from_address(address), np.uint32)
                assert (words.reshape(16, 2) == [5, words[1]]).all()
                assert address % 64 == 0
                args.append(self.maps[int(words[1])])
            else:
                assert np.dtype(str(kind.dtype)).itemsize == itemsize
                args.append(_array_at(address, shape, str(kind.dtype), strides))
        self.launches.append((grid, threads, shared, cluster, stream))
        if ptx is not None:
            run_kernel(
                ptx, grid, threads if isinstance(threads, tuple) else (threads,), args, shared, cluster
            )


def _array_at(address, shape, dtype, strides=None):
    interface = {"version": 3, "data": (address, False), "typestr": np.dtype(dtype).str}
    interface |= {"shape": shape, "strides": strides}
    return np.asarray(type("Interface", (), {"__array_interface__": interface})())


def install(monkeypatch, driver, run=True):
    """Make `driver` the GPU of this process; kernels run, unless `run` is false, and are only decoded."""
    compile_cubin = compiler.compile_cubin

    def compiled(function, types, architecture, *bounds):
        cubin, report = compile_cubin(function, types, architecture, *bounds)
        ptx = compiler.compile_ptx(function, types, architecture, *bounds) if run else None
        driver.kernels[cubin] = (ptx, report.shared, types)
        return cubin, report

    monkeypatch.setattr(compiler, "compile_cubin", compiled)
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    fake = gpu_driver.Gpu(driver)
    monkeypatch.setattr(gpu_driver, "get", lambda: fake)
    return fake
