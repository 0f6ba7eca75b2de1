"""The error bound for tensor cores: models of real ones stay within it, and planted faults do not."""

import sys

import numpy as np
import pytest

from minidist.kernels.cuda.cuda_rung import CudaRung
from minidist.kernels.measure import product_checks
from minidist.kernels.tpu.tensor_core import tensor_core_mma

pytest.importorskip("ml_dtypes")
pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")

from tests.helpers.cuda_kernels import through_numpy, without_gpu  # noqa: F401


@pytest.mark.parametrize("unit", ["float32", "A100", "H100"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tf32"])
def test_tensor_cores_stay_within_the_bound(unit, dtype):
    """All terms of one sign, the largest first: then what is cut off adds up."""
    kind = "float32" if dtype == "tf32" else dtype
    for k in (1, 5, 16, 700):
        a, b = (np.abs(x) for x in product_checks.inputs(6, 5, k, kind, seed=k))
        a = np.ascontiguousarray(np.sort(a, axis=1)[:, ::-1])
        c = tensor_core_mma(a, b, np.zeros((6, 5), "f4"), unit=unit, tf32=dtype == "tf32")
        product_checks.assert_product(c, a, b, sums="float32", tf32=dtype == "tf32")
        product_checks.assert_product(c.astype(kind), a, b, sums="float32", tf32=dtype == "tf32")
        with pytest.raises(AssertionError):
            product_checks.assert_product(c * np.float32(1.02), a, b, sums="float32", tf32=dtype == "tf32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_planted_faults_of_halves_fail_the_check(dtype):
    def dropped(a, b, c):
        through_numpy(a._replace(columns=a.columns - 1), b._replace(rows=b.rows - 1), c)

    def in_halves(a, b, c):
        kind = product_checks.numpy_dtype(a.dtype)
        left, right = a.view2d().view(kind), b.view2d().view(kind)
        total = np.zeros((c.rows, c.columns), kind)
        for p in range(a.columns):
            total = (total + np.outer(left[:, p], right[p])).astype(total.dtype)
        c.view2d().view(product_checks.numpy_dtype(c.dtype))[...] = total

    # The bound for TF32 is wider than what sums of float16 lose.
    for fault in (dropped,) if dtype == "float32" else (dropped, in_halves):
        faulty = CudaRung(9, "s9", "cuda", "", ("float16", "bfloat16", "float32"), fault, tf32=True)
        with pytest.raises(AssertionError, match=f"rung s9, m=6, n=7, k=60, {dtype}"):
            product_checks.check(faulty, 6, 7, 60, dtype, np.random.default_rng())


def test_bfloat16_needs_ml_dtypes(monkeypatch):
    assert product_checks.least_bytes(2, 3, 4, "bfloat16") == 2 * (8 + 12 + 6)
    assert product_checks.unit_roundoff("bfloat16") == 2.0**-8
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match="pip install ml-dtypes"):
        product_checks.inputs(1, 1, 1, "bfloat16", 0)
