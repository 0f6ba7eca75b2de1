"""Few columns, for each number of rows: nothing is read or written beside them."""

import numpy as np
import pytest

from minidist.kernels.cpu.support import register_tile


@pytest.mark.parametrize("m", range(1, 10))
@pytest.mark.parametrize("order", ["C", "F"])
def test_few_columns_of_any_number_of_rows(m, order):
    from minidist.kernels.cpu.support import small_products

    rng = np.random.default_rng()
    n, k = register_tile.tile_columns("float64") // 4, 37
    around = np.full((m + 8, k), np.nan)
    a, b = around[4:-4], np.asarray(rng.standard_normal((k, n)), order=order)
    a[...] = rng.standard_normal((m, k))
    whole = np.full((m + 8, n), np.nan)
    # Not `multiply`, with which Numba would compile all other ways, for seconds.
    small_products._few_columns(a, b, whole[4:-4])
    np.testing.assert_allclose(whole[4:-4], a @ b, rtol=1e-12, atol=1e-12)
    assert np.isnan(whole[:4]).all()
    assert np.isnan(whole[-4:]).all()
