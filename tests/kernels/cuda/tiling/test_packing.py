"""Matrices of any strides, their copies with a pitch, and what a tensor map can say of one."""

import numpy as np
import pytest

from minidist.kernels.cuda.runtime import matrix
from minidist.kernels.cuda.runtime.matrix import TensorMap
from minidist.kernels.cuda.tiling import packing
from tests.helpers.products import LAYOUTS, laid_out
from tests.helpers.refusals import refuses

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")

from tests.helpers.cuda_kernels import without_gpu  # noqa: F401


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_matrix_is_its_array_and_a_packed_one_has_a_pitch(layout, dtype):
    rng = np.random.default_rng()
    for shape in [(1, 1), (1, 9), (9, 1), (5, 7), (33, 40)]:
        x = rng.standard_normal(shape).astype(dtype)
        array, base = laid_out(x, layout)
        m = matrix.host_matrix(array, dtype)
        np.testing.assert_array_equal(m.view2d().view(dtype), x)
        np.testing.assert_array_equal(m.T.view2d().view(dtype), x.T)
        assert "reversed" in layout or x.size == 1 or np.shares_memory(m.data, base)
        assert min(m.row_stride, m.column_stride) >= 1
        assert m.data.dtype == (np.uint16 if dtype == "float16" else dtype)
        for padded in (False, True):
            p = packing.packed(m, 8, padded)
            np.testing.assert_array_equal(p.view2d().view(dtype), x)
            rows = p if p.order == "rows" else p.T
            assert rows.order == "rows"
            assert rows.row_stride % 8 == 0
            assert rows.address % (8 * rows.itemsize) == 0
            if p.data is not m.data:
                assert m.order in (p.order, "neither")
                whole = rows.data.view(dtype).reshape(rows.rows, rows.row_stride)
                np.testing.assert_array_equal(whole[:, rows.columns :], 0)
            elif padded:
                assert rows.columns % 8 == 0


RIGHT = {"rows": 9, "columns": 40, "pitch": 48, "box_rows": 64, "box_columns": 64, "dtype": "float16"}
test_what_a_tensor_map_can_not_hold_is_refused = refuses(
    lambda **change: [TensorMap(None, **each) for each in (RIGHT, {**RIGHT, **change})],
    ({"dtype": "int8"}, "dtype is 'int8'"),
    ({"rows": 0}, "0 x 40"),
    ({"pitch": 41}, r"pitch is 41 elements.*16 bytes.*packed"),
    ({"pitch": 32}, "pitch is 32"),
    ({"box_rows": 257}, "257 x 64"),
    ({"box_columns": 7}, "a row of the box is 14 bytes"),
    ({"box_columns": 128}, "a row of the box is 256 bytes"),
    ({"swizzle": 16}, "swizzle is 16"),
)
