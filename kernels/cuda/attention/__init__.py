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

To add a rung, write its file `s<number>_<name>.py`, of at most 150 lines. No list names rungs; `room` in a
rung's record holds the registers and shared memory of its kernels. Tiles and instructions are those of the
matmul ladder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...rung import ladder

if TYPE_CHECKING:
    from .cuda_attention_rung import CudaAttentionRung

    CUDA_ATTENTION_LADDER: tuple[CudaAttentionRung, ...]
    """The rungs of attention on a GPU: from three kernels to a backward pass on tensor cores."""

RUNGS, load, __getattr__ = ladder(__name__, "CUDA_ATTENTION_LADDER", cuda=True)
