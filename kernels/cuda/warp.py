"""Only a public import path: the code is in `kernels/cuda/instructions/`."""

from .instructions.copies import cp_async_16 as cp_async_16
from .instructions.copies import cp_async_16_or_zeros as cp_async_16_or_zeros
from .instructions.copies import cp_async_commit as cp_async_commit
from .instructions.copies import cp_async_wait as cp_async_wait
from .instructions.copies import load_128 as load_128
from .instructions.copies import store_64 as store_64
from .instructions.copies import store_128 as store_128
from .instructions.warp_fragments import cvt_bf16x2 as cvt_bf16x2
from .instructions.warp_fragments import cvt_f16x2 as cvt_f16x2
from .instructions.warp_fragments import cvt_tf32 as cvt_tf32
from .instructions.warp_fragments import ldmatrix_x4 as ldmatrix_x4
from .instructions.warp_fragments import ldmatrix_x4_trans as ldmatrix_x4_trans
from .instructions.warp_fragments import load_shared as load_shared
from .instructions.warp_fragments import mma_m16n8k8_tf32 as mma_m16n8k8_tf32
from .instructions.warp_fragments import mma_m16n8k16_bf16 as mma_m16n8k16_bf16
from .instructions.warp_fragments import mma_m16n8k16_f16 as mma_m16n8k16_f16
from .instructions.warp_fragments import stmatrix_x4 as stmatrix_x4
from .instructions.warp_fragments import uniform as uniform
