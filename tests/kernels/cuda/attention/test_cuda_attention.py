"""Every rung of the CUDA ladder of attention without a GPU: what it computes, and what it counts."""

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")
pytest.importorskip("ml_dtypes")

from minidist.kernels.cuda import attention
from minidist.kernels.cuda.attention import CUDA_ATTENTION_LADDER
from tests.helpers.attention import check
from tests.helpers.cuda_kernels import without_gpu  # noqa: F401
from tests.helpers.products import check_ladder

EVERY_DTYPE = [(step, dtype) for step in CUDA_ATTENTION_LADDER for dtype in step.dtypes]
every_rung = pytest.mark.parametrize("step", CUDA_ATTENTION_LADDER, ids=lambda step: step.name)
every_dtype = pytest.mark.parametrize(
    ("step", "dtype"), EVERY_DTYPE, ids=[f"{step.name}-{dtype}" for step, dtype in EVERY_DTYPE]
)
# What stands before, queries, keys, width: a single number, ragged, past a tile each way, the usual width.
SIZES = [((1,), 1, 1, 1), ((2, 3), 5, 3, 7), ((), 37, 150, 33), ((2,), 70, 70, 64), ((1,), 133, 133, 128)]


def test_the_ladder_holds_every_rung_file_in_order():
    check_ladder(attention, CUDA_ATTENTION_LADDER, lambda step: f"Attention in CUDA, rung {step.number}: ")


@every_dtype
def test_each_rung_is_the_formula(step, dtype):
    rng = np.random.default_rng()
    for size in SIZES:
        for causal in (False, True)[: 1 + (size[1] == size[2])]:
            check(step, size, causal, rng, dtype)
