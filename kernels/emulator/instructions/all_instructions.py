"""Importing this file registers every instruction that the emulator knows.

Most units are in this folder. Others are beside the state that they change: copies/, memory/, checks/ and
synchronization/.
"""

from ..checks import async_accesses  # noqa: F401
from ..copies import async_copies, bulk_copies, clusters  # noqa: F401
from ..memory import array_reshape, loads_and_stores  # noqa: F401
from ..synchronization import barriers, grid_barrier  # noqa: F401
from . import atomics, half_precision_calls, ldmatrix, mbarriers, mma, printing, register_pool, warps, wgmma  # noqa: F401  # noqa: F401
