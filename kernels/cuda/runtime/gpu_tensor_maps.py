"""Tensor maps on a GPU: encoded by the driver, written to its memory once, and kept for the next launch.

Encoding takes the driver microseconds, and the map has to be in global memory before the kernel runs. A
repeated product finds its maps here. Memsets write the map's 128 bytes in the order of the stream, so nothing
waits and no host memory has to outlive the call.

Source: CUDA Driver API, cuTensorMapEncodeTiled; CUDA C++ Programming Guide, "Using TMA".
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from .gpu_driver import Gpu, torch_on_gpu
from .gpu_memory import DeviceArray, allocate
from .tensor_map import BYTES, SIZE, TensorMap

# Maps, 512 bytes each; the least recently used one goes first. A training step has three for every product,
# and with too few kept each product would encode and write its own again.
KEPT = 4096
_maps: OrderedDict[tuple[Any, ...], DeviceArray] = OrderedDict()
_lock = threading.Lock()


def on_gpu(g: Gpu, x: TensorMap, device: int, stream: int) -> DeviceArray:
    """Return an array of 128 bytes on the GPU that holds the map, for a launch on `stream`.

    The caller keeps it until the launch. While torch captures a graph, the stream's work is recorded and not
    done, and memory belongs to the graph and lives as long; so each graph gets maps of its own.
    """
    captured = stream != 0 and _capturing()  # the default stream is never captured
    # Each stream has its own maps: memory is given back in the order of the stream that it was allocated on.
    what = (x.array.address, x.rows, x.columns, x.pitch, x.box_rows, x.box_columns, x.dtype, x.swizzle)
    key = (what, device, stream)
    with _lock:
        found = _maps.get(key)
        if found is not None and not captured:
            _maps.move_to_end(key)
            return found
        there = allocate(SIZE, "uint8")
        address = there.address
        for word, run in itertools.groupby(encode(g, x)):  # many are 0
            count = len(list(run))
            target = g.driver.CUdeviceptr(address)
            g.call("cuMemsetD32Async", target, word, count, g.driver.CUstream(stream))
            address += 4 * count
        if not captured:
            _maps[key] = there
            if len(_maps) > KEPT:
                _maps.popitem(last=False)
        return there


def _capturing() -> bool:
    torch = torch_on_gpu()
    return torch is not None and bool(torch.cuda.is_current_stream_capturing())


def encode(g: Gpu, x: TensorMap) -> list[int]:
    """Return the 32 words of the driver's CUtensorMap: sizes, strides and boxes with the columns first."""
    d = g.driver
    size = BYTES[x.dtype]
    swizzle = f"CU_TENSOR_MAP_SWIZZLE_{f'{x.swizzle}B' if x.swizzle else 'NONE'}"
    memory = ctypes.create_string_buffer(2 * SIZE)
    start = -ctypes.addressof(memory) % SIZE
    error = _encoder(g)(
        ctypes.addressof(memory) + start,
        getattr(d.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{x.dtype.upper()}"),
        2,
        x.array.address,
        (ctypes.c_uint64 * 2)(x.columns, x.rows),
        (ctypes.c_uint64 * 1)(x.pitch * size),
        (ctypes.c_uint32 * 2)(x.box_columns, x.box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(d.CUtensorMapSwizzle, swizzle),
        d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # zeros
    )
    if error:
        raise g.error(f"cuTensorMapEncodeTiled for {x}", d.CUresult(error))
    return list(struct.unpack_from(f"{SIZE // 4}I", memory, start))


@functools.lru_cache(maxsize=8)
def _encoder(g: Gpu) -> Callable[..., int]:
    """Return the driver's cuTensorMapEncodeTiled.

    It wants the map's memory on 64 bytes (cuda.h declares 128). A CUtensorMap of cuda.bindings, as of version
    13.5, lies on 16, so the driver's answer would depend on where Python put the object.
    """
    address, _ = g.call("cuGetProcAddress", b"cuTensorMapEncodeTiled", 12000, 0)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    # map, type, rank; address, sizes, strides, box, steps; interleave, swizzle, promotion, fill
    arguments = (pointer, number, number, *[pointer] * 5, *[number] * 4)
    function: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(int(address))
    return function
