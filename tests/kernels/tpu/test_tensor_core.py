"""A tensor core's numerics: products exact, sums in float32, in the documented order and rounding."""

import math
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from minidist.kernels.tpu.tensor_core import UNITS, round_to_tf32, tensor_core_mma
from tests.helpers.refusals import refuses

EVERY_UNIT = ("float32", *UNITS)

every_unit = pytest.mark.parametrize("unit", EVERY_UNIT)
seeds = st.integers(0, 2**32)


def any_halves(rng, *shape):
    """Finite float16 numbers of any size: large, small, subnormal, and both zeros."""
    x = rng.integers(0, 2**16, shape, dtype=np.uint16).view(np.float16)
    return np.where(np.isfinite(x), x, np.float16(1))


def tile(a, b, c):
    """Lists as the arguments of tensor_core_mma."""
    return np.array(a, "float16"), np.array(b, "float16"), np.array(c, "float32")


def row_times_column(row, column, start, unit="float32"):
    a, b, c = tile([row], [[x] for x in column], [[start]])
    return float(tensor_core_mma(a, b, c, unit)[0, 0])


def test_float32_sums_start_with_c_and_go_in_the_order_of_k():
    big = [4096, 1, 4096], [4096, 1, -4096]
    assert row_times_column(*big, 0) == 0  # 2**24 + 1 - 2**24, from the left
    assert row_times_column([4096, 4096, 1], [4096, -4096, 1], 0) == 1
    assert row_times_column([1, 4096], [1, -4096], 2**24) == 0  # c first


@settings(deadline=None, max_examples=60)
@given(seeds, st.integers(0, 9), st.integers(0, 9), st.integers(0, 40))
def test_float32_sums_round_each_sum_to_the_nearest(seed, m, n, k):
    """In float64 the product and the sum of numbers of like size are exact, so one rounding is left."""
    rng = np.random.default_rng(seed)
    a, b = (rng.uniform(-2, 2, shape).astype("float16") for shape in ((m, k), (k, n)))
    c = rng.uniform(-2, 2, (m, n)).astype("float32")
    expected = c
    for p in range(k):
        exact = expected.astype("float64") + a[:, p, None].astype("float64") * b[p].astype("float64")
        expected = exact.astype("float32")
    np.testing.assert_array_equal(tensor_core_mma(a, b, c), expected)


def test_real_units_align_to_the_sum_of_the_factors_exponents():
    """1.5 x 1.5 = 2.25 counts as 2**0, not as 2**1: a term of 2**-23 is kept beside it."""
    small = 2.0**-11, 2.0**-12
    assert row_times_column([1.5, small[0]], [1.5, small[1]], 2.0**-23, "V100") == 2.25 + 2.0**-22


def exact_block(products, factors, c, extra_bits):
    """The sum of one block by the book, in rational numbers: align, cut, add, cut to float32."""
    exponents = [sum(math.frexp(x)[1] - 1 for x in pair) for pair in factors if 0 not in pair]
    if c:
        exponents.append(math.frexp(c)[1] - 1)
    if not exponents:
        return 0.0
    unit = Fraction(2) ** (max(exponents) - 23 - extra_bits)
    total = unit * sum(math.trunc(term / unit) for term in (*products, Fraction(c)))
    if total == 0:
        return 0.0
    exponent = math.frexp(float(total))[1] - 1
    if abs(total) < Fraction(2) ** exponent:  # float() had rounded up to the next power of two
        exponent -= 1
    last_place = Fraction(2) ** (max(exponent, -126) - 23)
    return float(last_place * math.trunc(total / last_place))


@settings(deadline=None, max_examples=80)
@given(seeds, st.sampled_from(list(UNITS)), st.integers(0, 40), st.booleans())
def test_real_units_add_blocks_as_documented(seed, unit, k, any_size):
    rng = np.random.default_rng(seed)
    if any_size:
        a, b = any_halves(rng, 3, k), any_halves(rng, k, 2)
    else:  # terms of like size, where each bit that is cut counts
        a, b = (rng.standard_normal(shape).astype("float16") for shape in ((3, k), (k, 2)))
    c = rng.standard_normal((3, 2)).astype("float32")
    d = tensor_core_mma(a, b, c, unit)
    block = UNITS[unit].blocks["float16"]
    for i, j in np.ndindex(d.shape):
        expected = float(c[i, j])
        for start in range(0, k, block):
            factors = [(float(a[i, p]), float(b[p, j])) for p in range(start, min(start + block, k))]
            products = [Fraction(x) * Fraction(y) for x, y in factors]
            expected = exact_block(products, factors, expected, UNITS[unit].extra_bits)
        assert float(d[i, j]) == expected


@every_unit
def test_any_size_any_strides_and_nothing_is_overwritten(unit):
    rng = np.random.default_rng()
    for m, n, k in [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0), (1, 1, 1), (7, 5, 19), (16, 8, 16)]:
        a, b = (
            rng.integers(-9, 9, (k, m)).astype("float16").T,
            rng.integers(-9, 9, (k, 2 * n)).astype("float16"),
        )
        b, c = b[:, ::2], rng.integers(-9, 9, (m, n)).astype("float32")[::-1]
        before = a.copy(), b.copy(), c.copy()
        d = tensor_core_mma(a, b, c, unit)
        np.testing.assert_array_equal(d, a.astype(int) @ b.astype(int) + c)
        assert d.shape == (m, n)
        assert d.dtype == np.float32
        d[...] = 99
        for x, original in zip((a, b, c), before, strict=True):
            np.testing.assert_array_equal(x, original)


@every_unit
def test_nan_and_infinity_travel_without_a_warning(unit):
    inf, nan = math.inf, math.nan
    a, b, c = tile([[inf, 1], [0, 1], [inf, -inf], [1, 2]], [[0, 1], [1, 1]], np.zeros((4, 2)))
    c[3] = nan, inf
    expected = [[nan, inf], [1, 1], [nan, nan], [nan, inf]]
    np.testing.assert_array_equal(tensor_core_mma(a, b, c, unit), np.array(expected, "float32"))
    c[3] = -inf, 5
    expected[3] = [-inf, 8]
    np.testing.assert_array_equal(tensor_core_mma(a, b, c, unit), np.array(expected, "float32"))


@pytest.mark.parametrize("unit", ["float32", "A100", "H100"])
def test_tf32_rounds_its_inputs_and_sums_as_half_does(unit):
    rng = np.random.default_rng()
    a, b = rng.integers(-9, 9, (5, 21)).astype("float16"), rng.standard_normal((21, 6)).astype("float16")
    c = rng.standard_normal((5, 6)).astype("float32")
    # Halves of ordinary size are TF32 numbers. Blocks are half as long, which a real unit's result shows.
    d = tensor_core_mma(a.astype("float32"), b.astype("float32"), c, unit, tf32=True)
    if unit == "float32":
        np.testing.assert_array_equal(d, tensor_core_mma(a, b, c))
    np.testing.assert_allclose(d, tensor_core_mma(a, b, c, unit), atol=1e-4)
    x = np.full((1, 1), 1 + 2.0**-12, "float32")
    assert tensor_core_mma(x, x, np.zeros((1, 1), "float32"), unit, tf32=True)[0, 0] == 1
    x[...] = 2e19
    assert tensor_core_mma(x, x, np.zeros((1, 1), "float32"), unit, tf32=True)[0, 0] == math.inf


def test_tf32_blocks_are_half_as_long():
    """On the A100, 4 products: of 2**24 and 3 + 3 ones, each block's sum is cut to a multiple of 2."""
    a, b, c = (np.array(x, "float32") for x in ([[1, 1, 1, 0] * 2], [[1]] * 8, [[2**24]]))
    assert tensor_core_mma(a, b, c, "A100", tf32=True)[0, 0] == 2**24 + 4
    assert tensor_core_mma(*tile(a, b, c), "A100")[0, 0] == 2**24 + 6


def test_rounding_to_tf32():
    last = 2.0**-10
    cases = {
        1 + last / 2: 1 + last,  # ties away from zero
        1 + 1.5 * last: 1 + 2 * last,
        1 + 0.49 * last: 1,
        -(1 + last / 2): -(1 + last),
        2 - last / 4: 2,  # carries into the exponent
        0.0: 0.0,
        3.4028235e38: math.inf,
        math.inf: math.inf,
        -math.inf: -math.inf,
    }
    rounded = round_to_tf32(np.array(list(cases), "float32"))
    np.testing.assert_array_equal(rounded, np.array(list(cases.values()), "float32"))
    # All bits of a NaN may be set, and rounding it up would make it a zero.
    assert np.isnan(round_to_tf32(np.array([0x7FFFFFFF, 0xFFFFFFFF], "uint32").view("float32"))).all()
    x = np.random.default_rng().standard_normal((40, 30)).astype("float32").T
    once = round_to_tf32(x)
    np.testing.assert_array_equal(round_to_tf32(once), once)
    np.testing.assert_allclose(once, x, rtol=2.0**-11)
    assert not (once.view("uint32") & 0x1FFF).any()


@every_unit
def test_bfloat16(unit):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    rng = np.random.default_rng()
    a, b = (
        rng.integers(-200, 200, (5, 21)).astype(bfloat16),
        rng.integers(-200, 200, (21, 6)).astype(bfloat16),
    )
    c = np.zeros((5, 6), "float32")
    if unit == "V100":
        with pytest.raises(ValueError, match=r"unit is 'V100', which takes no bfloat16: pass float16"):
            tensor_core_mma(a, b, c, unit)
        return
    np.testing.assert_array_equal(tensor_core_mma(a, b, c, unit), a.astype(int) @ b.astype(int))


half, single = np.ones((2, 2), "float16"), np.ones((2, 2), "float32")


test_mistakes_are_named_in_one_sentence = refuses(
    lambda given: tensor_core_mma(*given),
    ((single, half, single), TypeError, r"a has dtype float32, .*float16.*or pass tf32=True"),
    (
        (half, np.ones((2, 2)), single),
        TypeError,
        r"b has dtype float64, .*convert it with .astype\('float16'\)",
    ),
    ((half, half, half), TypeError, r"c has dtype float16, and sums are float32"),
    ((half, half, [[0.0]]), TypeError, r"c is a list, not a NumPy array"),
    ((half, half[0], single), r"b has 1 dimensions, shape \(2,\)"),
    ((half, half[:1], single), r"a \(2, 2\), b \(1, 2\) and c \(2, 2\) do not fit"),
    ((half, half, single[:1]), r"c \(1, 2\) do not fit: pass \(m, k\), \(k, n\) and \(m, n\)"),
    ((half, half, single, "B300"), r"unit is 'B300': pass 'float32', 'V100', 'A100', 'H100'"),
    ((half, half, single, "A100", True), TypeError, r"a has dtype float16, and the unit takes float32"),
    ((single, single, single, "V100", True), r"unit is 'V100', which takes no tf32"),
)


def test_only_float32_is_rounded_to_tf32():
    with pytest.raises(TypeError, match=r"x is float64, not a NumPy array of float32: convert it"):
        round_to_tf32(np.ones(3))
