"""The CUDA ladder in Numba: each file changes one thing, and says why it is faster.

One source runs on a GPU, in an emulator of its instructions where there is none, and in Numba's simulator
(`device.backend`). To add a rung, write its file and name it in RUNGS; nothing else in the project lists
rungs. `CUDA_LADDER` imports them, and Numba with them, when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rung import CudaRung

    CUDA_LADDER: tuple[CudaRung, ...]

RUNGS = (
    "s1_naive",
    "s2_coalesced",
    "s3_shared_tile",
    "s4_thread_tile_1d",
    "s5_thread_tile_2d",
    "s6_vector_loads",
    "s7_async_copy",
    "s8_warp_tile",
    "s9_tensor_core",
    "s10_hopper",
)


def __getattr__(name: str) -> Any:
    if name == "CUDA_LADDER":
        globals()[name] = tuple(load(step) for step in RUNGS)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load(name: str) -> CudaRung:
    """Return the rung with this name, as in RUNGS. Raises ImportError where numba-cuda is not installed."""
    from .runtime.device import require_toolkit

    require_toolkit()
    step: CudaRung = importlib.import_module(f".{name}", __name__).RUNG
    return step
