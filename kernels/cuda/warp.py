"""The import path of a warp's instructions that lessons and programs use; the code is in `instructions`."""

from .instructions.copies import (
    cp_async_16,
    cp_async_16_or_zeros,
    cp_async_commit,
    cp_async_wait,
    load_128,
    store_64,
    store_128,
)
from .instructions.warp import (
    cvt_bf16x2,
    cvt_f16x2,
    cvt_tf32,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_shared,
    mma_m16n8k8_tf32,
    mma_m16n8k16_bf16,
    mma_m16n8k16_f16,
    stmatrix_x4,
    uniform,
)

__all__ = [
    "cp_async_16",
    "cp_async_16_or_zeros",
    "cp_async_commit",
    "cp_async_wait",
    "cvt_bf16x2",
    "cvt_f16x2",
    "cvt_tf32",
    "ldmatrix_x4",
    "ldmatrix_x4_trans",
    "load_128",
    "load_shared",
    "mma_m16n8k8_tf32",
    "mma_m16n8k16_bf16",
    "mma_m16n8k16_f16",
    "stmatrix_x4",
    "store_64",
    "store_128",
    "uniform",
]
