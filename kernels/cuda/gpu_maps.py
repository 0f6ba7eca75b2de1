"""Tensor maps on a GPU: encoded by the driver, put into its memory once, and found again by what they say.

A product that is repeated finds its maps here: encoding takes the driver microseconds, and the map has to be
in global memory before the kernel runs. Its 128 bytes are written by memsets in the order of the stream, so
that nothing waits and no host memory has to outlive the call.

Source: CUDA Driver API, cuTensorMapEncodeTiled; CUDA C++ Programming Guide, "Using TMA".
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from .gpu_memory import DeviceArray, allocate
from .tensor_map import BYTES, SIZE, TensorMap

if TYPE_CHECKING:
    from .gpu import Gpu

KEPT = 256  # maps: the one whose last use is longest ago goes first
_maps: OrderedDict[tuple[Any, ...], DeviceArray] = OrderedDict()
_lock = threading.Lock()


def on_gpu(g: Gpu, x: TensorMap, device: int, stream: int) -> DeviceArray:
    """Return an array of 128 bytes on the GPU that holds the map, for a launch on `stream`.

    Whoever launches keeps it until then. While torch captures a graph, work of the stream is not done but
    recorded, and memory is the graph's: a map made then is not kept for other launches.
    """
    # Memory is given back in the order of the stream that it was taken on: each stream has its own.
    key = (
        *(x.array.address, x.rows, x.columns, x.pitch),
        *(x.box_rows, x.box_columns, x.dtype, x.swizzle, device, stream),
    )
    with _lock:
        found = _maps.get(key)
        if found is not None:
            _maps.move_to_end(key)
            return found
        there = allocate(SIZE, "uint8")
        for i, word in enumerate(encode(g, x)):
            target = g.driver.CUdeviceptr(there.address + 4 * i)
            g.call("cuMemsetD32Async", target, word, 1, g.driver.CUstream(stream))
        if not _capturing():
            _maps[key] = there
            if len(_maps) > KEPT:
                _maps.popitem(last=False)
        return there


def _capturing() -> bool:
    torch: Any = sys.modules.get("torch")
    return bool(torch and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def encode(g: Gpu, x: TensorMap) -> list[int]:
    """Return the 32 words of the driver's CUtensorMap: sizes, strides and boxes with the columns first."""
    d = g.driver
    size = BYTES[x.dtype]
    swizzle = f"CU_TENSOR_MAP_SWIZZLE_{f'{x.swizzle}B' if x.swizzle else 'NONE'}"
    encoded = g.call(
        "cuTensorMapEncodeTiled",
        getattr(d.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{x.dtype.upper()}"),
        2,
        x.array.address,
        [d.cuuint64_t(x.columns), d.cuuint64_t(x.rows)],
        [d.cuuint64_t(x.pitch * size)],
        [d.cuuint32_t(x.box_columns), d.cuuint32_t(x.box_rows)],
        [d.cuuint32_t(1), d.cuuint32_t(1)],
        d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(d.CUtensorMapSwizzle, swizzle),
        d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # zeros
    )
    words = []
    for pair in encoded.opaque:
        words += [int(pair) & 0xFFFFFFFF, int(pair) >> 32]
    return words
