"""Time recorded launches on a GPU, by its own clock. The time stands beside the score and is no part of it.

The machine code is made of the PTX that the emulator has run without a fault, on the same numbers. PTX is
compiled for sm_90a, which H100 and H200 run.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..cuda.runtime import compiler, device, gpu_driver
from ..cuda.runtime.gpu_launch import LoadedKernel
from ..measure import gpu_timer
from ..rung import Array

ARCHITECTURE, CAPABILITY = "sm_90a", (9, 0)
CALLS, ROUNDS = 20, 5


def seconds(launches: list[Any], programs: list[str], arrays: list[Array]) -> float | None:
    """Return the seconds of one call, the least of some rounds; None if there is no GPU that runs sm_90a."""
    if device.backend() != "gpu" or (timer := gpu_timer.find()) is None:
        return None
    g = gpu_driver.get()
    current = g.current()
    if g.properties(current).capability != CAPABILITY:
        return None
    there = [gpu_driver.allocate(x.nbytes, "uint8") for x in arrays]
    for x, memory in zip(arrays, there, strict=True):
        gpu_driver.upload(x, memory)
    calls = []
    for number, grid, block, shared, cluster, args, _ in launches:
        cubin, log = compiler.link(programs[number].encode(), ARCHITECTURE, "the kernel", "ptx")
        report = compiler.parse(log, ARCHITECTURE)
        given = tuple(value for x in args for value in _there(x, there))
        loaded = LoadedKernel(g, current, report.entry, tuple(block), cubin, report, given)
        calls.append(partial(loaded.launch, tuple(grid), given, shared, cluster, g.stream()))

    def run() -> None:
        for call in calls:
            call()

    return min(gpu_timer.rounds(timer, run, 0.0, CALLS, ROUNDS))


def _there(x: Any, there: list[Any]) -> list[Any]:
    """Return a recorded argument as a launch on the GPU takes it; a tuple becomes its items."""
    if "items" in x:
        return [value for item in x["items"] for value in _there(item, there)]
    if "number" in x:
        value, dtype = x["number"], x["dtype"] or ("f8" if isinstance(x["number"], float) else "i8")
        return [np.dtype(dtype).type(value)]
    memory, dtype = there[x["array"]], np.dtype(x["dtype"]).name
    address = memory.address + x["offset"]
    return [gpu_driver.DeviceArray(address, dtype, tuple(x["shape"]), tuple(x["strides"]), memory)]
