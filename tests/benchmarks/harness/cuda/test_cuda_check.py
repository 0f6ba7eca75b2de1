"""The check of a GPU's products: what is right passes, one wrong element, NaN or tile does not."""

import numpy as np
import pytest
import torch

from minidist.benchmarks.harness.cuda import cuda_check
from minidist.benchmarks.harness.cuda.cuda_check import assert_product, bound, samples
from minidist.kernels.measure import product_checks

KINDS = ("float32", "float64", "float16", "bfloat16", "tf32")


def product(kind, shape=(70, 50, 90), out=None, seed=0):
    """Operands of a kind, and their product as tensor cores would have it, rounded from float64."""
    m, n, k = shape
    dtype = getattr(torch, "float32" if kind == "tf32" else kind)
    a, b = (torch.from_numpy(x).to(dtype) for x in product_checks.inputs(m, n, k, np.float64, seed))
    c = (a.double() @ b.double()).to(dtype if out is None else out)
    return c, a, b


def check(kind, c, a, b, seed=0):
    sums = "float32" if kind in ("float16", "bfloat16", "tf32") else kind
    return assert_product(c, a, b, "rung x", sums=sums, tf32=kind == "tf32", seed=seed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_product_passes_and_its_error_is_told(kind):
    c, a, b = product(kind)
    largest = check(kind, c, a, b)
    exact = a.double() @ b.double()
    expected = ((c.double() - exact).abs() / (a.double().abs() @ b.double().abs())).max()
    assert largest == pytest.approx(float(expected))


def test_factors_rounded_to_tf32_pass_only_as_such():
    c, a, b = product("tf32")
    short = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)]  # 10 bits of the fraction
    c = (short[0].double() @ short[1].double()).float()
    assert check("tf32", c, a, b) > 1e-5
    with pytest.raises(AssertionError):
        check("float32", c, a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [(0, 0), (69, 49), (31, 7)])
def test_one_product_too_many_is_found(kind, at):
    c, a, b = product(kind)
    c[at] += a[at[0], 3] * b[3, at[1]]
    with pytest.raises(AssertionError, match=rf"^rung x: 1 of 3500 .*c\[{at[0]}, {at[1]}\] is .*, not "):
        check(kind, c, a, b)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_was_never_written_is_found(value):
    c, a, b = product("float32")
    c[5, 5:7] = value
    with pytest.raises(AssertionError, match="rung x: 2 of 3500 elements are not finite"):
        check("float32", c, a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 100, 4096])
def test_the_bound_is_the_harnesss(kind, k):
    dtype = "float32" if kind == "tf32" else kind
    sums = "float64" if kind == "float64" else "float32"
    found = bound(k, dtype, sums, kind == "tf32")
    reference = product_checks.error_bound(k, np.float64, np.float64)
    try:
        assert found == product_checks.error_bound(k, dtype, sums, kind == "tf32") + reference
    except ImportError:
        assert kind == "bfloat16"  # which the harness has only with ml_dtypes


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(cuda_check, "LARGEST_WHOLE", 40)
    monkeypatch.setattr(cuda_check, "SAMPLES", 8)


def test_a_large_product_is_checked_in_some_rows_and_columns(few):
    check("float32", *product("float32"))
    parts = list(samples(70, 50, 90, seed=3))
    assert [(len(rows), len(columns)) for rows, columns in parts] == [(8, 50), (70, 8)]
    again = list(samples(70, 50, 90, seed=4))
    assert parts[0][0].tolist() != again[0][0].tolist()
    assert [len(x) for x in next(samples(3, 5, 90, seed=3))] == [3, 5]


@pytest.mark.parametrize("seed", range(5))
def test_no_wrong_tile_escapes(few, seed):
    """18 rows contain one of the eight parts of 70 rows, of each of which one is checked."""
    c, a, b = product("float32")
    for i in range(0, 63, 9):
        wrong = c.clone()
        wrong[i : i + 18, 30:44] *= 1.5
        with pytest.raises(AssertionError, match="are wrong"):
            check("float32", wrong, a, b, seed)


def test_operands_are_left_alone():
    c, a, b = product("float64")
    before = a.clone(), b.clone(), c.clone()
    check("float64", c, a, b)
    for x, y in zip((a, b, c), before, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
