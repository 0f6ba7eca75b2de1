"""The attention ladder in CUDA: softmax(q k^T / sqrt(width)) v on a GPU, or in the emulator.

| File | The one idea |
|---|---|
| s1_three_kernels | the definition: scores, their softmax, the product with v |
| s2_warp_rows | online softmax: a warp takes a query, and no scores are stored |
| s3_shared_tiles | tiles of keys and values in shared memory serve many queries |
| s4_tensor_core | tensor cores, and the softmax in registers |
| s5_backward | the backward pass computes the weights again, on tensor cores |
| cuda_attention_rung.py | what a rung is: checks, and copies to a GPU and back |
| products.py | products of tiles on tensor cores, for rungs 4 and 5 |

To add a rung, write its file `s<number>_<name>.py`, of at most 150 lines. No list names rungs; ROOM in the
ladder's test holds the registers and shared memory of each kernel. Tiles and instructions are those of the
matmul ladder.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ...rung import files_of_rungs

if TYPE_CHECKING:
    from .cuda_attention_rung import CudaAttentionRung

    CUDA_ATTENTION_LADDER: tuple[CudaAttentionRung, ...]
    """The rungs of attention on a GPU: from three kernels to a backward pass on tensor cores."""

RUNGS = files_of_rungs(__file__)


def __getattr__(name: str) -> Any:
    """Import the rungs, and Numba, when the ladder is first asked for."""
    if name != "CUDA_ATTENTION_LADDER":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = tuple(load(step) for step in RUNGS)
    return globals()[name]


def load(name: str) -> CudaAttentionRung:
    """Return the rung with this name from RUNGS. Raises ImportError if numba-cuda is not installed."""
    from ..runtime.device import require_toolkit

    require_toolkit()
    step: CudaAttentionRung = importlib.import_module(f".{name}", __name__).RUNG
    return step
