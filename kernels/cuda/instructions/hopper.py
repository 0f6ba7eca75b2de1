"""The instructions that Hopper added (compute capability 9.0), from one place.

A block there is no longer threads that do the same: one thread starts copies (`tma.py`), warp groups start
matrix multiplications (`wgmma.py`), and both go on by themselves. `barriers.py` is how the parts wait for
each other.
"""

from .barriers import (
    barrier_sync,
    cluster_arrive,
    cluster_rank,
    cluster_wait,
    fence_mbarrier_init,
    fence_proxy_async,
    mbarrier_arrive,
    mbarrier_arrive_at,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
)
from .tma import (
    tensor_map_acquire,
    tma_load_2d,
    tma_load_2d_multicast,
    tma_store_2d,
    tma_store_commit,
    tma_store_wait,
    tma_store_wait_read,
)
from .wgmma import descriptor, setmaxnreg_dec, setmaxnreg_inc, warp_group_multiply, wgmma_commit

__all__ = [
    "barrier_sync",
    "cluster_arrive",
    "cluster_rank",
    "cluster_wait",
    "descriptor",
    "fence_mbarrier_init",
    "fence_proxy_async",
    "mbarrier_arrive",
    "mbarrier_arrive_at",
    "mbarrier_expect",
    "mbarrier_init",
    "mbarrier_wait",
    "setmaxnreg_dec",
    "setmaxnreg_inc",
    "tensor_map_acquire",
    "tma_load_2d",
    "tma_load_2d_multicast",
    "tma_store_2d",
    "tma_store_commit",
    "tma_store_wait",
    "tma_store_wait_read",
    "warp_group_multiply",
    "wgmma_commit",
]
