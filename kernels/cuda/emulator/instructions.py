"""Importing this registers all instructions that the emulator knows."""

from . import (
    access,
    arithmetic_units,
    async_copies,
    atomic_units,
    barriers,
    bulk_copies,
    clusters,
    half_calls,
    matrix_moves,
    matrix_units,
    mbarrier_units,
    printing,
    proxies,
    register_pool,
    warp_groups,
    warp_units,
)

__all__ = [
    "access",
    "arithmetic_units",
    "async_copies",
    "atomic_units",
    "barriers",
    "bulk_copies",
    "clusters",
    "half_calls",
    "matrix_moves",
    "matrix_units",
    "mbarrier_units",
    "printing",
    "proxies",
    "register_pool",
    "warp_groups",
    "warp_units",
]
