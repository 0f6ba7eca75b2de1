"""Importing this registers all instructions that the emulator knows."""

from ..checks import async_proxy
from ..copies import async_copies, bulk_copies, clusters
from ..memory import array_reshape, loads_and_stores
from ..synchronization import barriers, grid_barrier
from . import (
    arithmetic,
    atomics,
    half_precision_calls,
    ldmatrix,
    mbarriers,
    mma,
    printing,
    register_pool,
    warps,
    wgmma,
)

__all__ = [
    "arithmetic",
    "array_reshape",
    "async_copies",
    "async_proxy",
    "atomics",
    "barriers",
    "bulk_copies",
    "clusters",
    "grid_barrier",
    "half_precision_calls",
    "ldmatrix",
    "loads_and_stores",
    "mbarriers",
    "mma",
    "printing",
    "register_pool",
    "warps",
    "wgmma",
]
