"""Rows in whole vectors: the largest, powers of 2 and their sum, and what backward does with them."""

import numpy as np
import pytest
from numba import njit

from minidist.kernels.cpu.attention.support import vector_softmax
from minidist.kernels.cpu.support.vector_moves import pointer


@njit
def largest(x, count):
    return vector_softmax.largest(pointer(x, 0, 0), count)


@njit
def powers(x, count, scale, shift):
    return vector_softmax.powers(pointer(x, 0, 0), count, scale, shift)


@njit
def gradients(scores, slopes, count, scale, shifts, means):
    rows = pointer(shifts, 0, 0), pointer(means, 0, 0)
    vector_softmax.gradients(pointer(scores, 0, 0), pointer(slopes, 0, 0), count, scale, *rows)


def row(numbers):
    return np.asarray(numbers, "float32").reshape(1, -1)


@pytest.mark.parametrize("count", [16, 32, 64, 80, 208, 256])
def test_rows_of_any_number_of_vectors(count):
    rng = np.random.default_rng()
    x, slopes, shifts, means = (row(rng.standard_normal(count)) for _ in range(4))
    assert largest(x, count) == x.max()
    expected = np.exp2(2 * x.astype("f8") - 1)
    y = x.copy()
    np.testing.assert_allclose(powers(y, count, np.float32(2), np.float32(1)), expected.sum(), rtol=1e-5)
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    p, z = x.copy(), slopes.copy()
    gradients(p, z, count, np.float32(3), shifts, means)
    expected = np.exp2(3 * x.astype("f8") - shifts)
    np.testing.assert_allclose(p, expected, rtol=1e-5)
    np.testing.assert_allclose(z, expected * (slopes.astype("f8") - means), rtol=1e-4, atol=1e-5)


def test_a_power_is_right_to_its_last_bits_but_one_wherever_float32_has_it():
    x = row(np.linspace(-126, 0, 16 * 4096).round(3))
    expected = np.exp2(x.astype("f8"))
    powers(x, x.size, np.float32(1), np.float32(0))
    np.testing.assert_allclose(x, expected, rtol=2.5e-7)  # 8e-8 of the polynomial, and float32's rounding


def test_what_is_too_small_is_zero_and_nan_stays():
    x = row([0, -np.inf, -1e30, -150, -127.6, np.nan, -1, -126] + [-np.inf] * 8)
    powers(x, 16, np.float32(1), np.float32(0))
    np.testing.assert_allclose(x[0, [0, 6, 7]], [1, 0.5, 2.0**-126], rtol=1e-6)
    assert (x[0, [1, 2, 3, 4, 8, 15]] == 0).all()
    assert np.isnan(x[0, 5])
