"""The check finds what is wrong: each planted fault has to fail it, and no right result may."""

import dataclasses
import itertools

import numpy as np
import pytest

from minidist.kernels import Rung
from minidist.kernels.measure import product_checks


def numpy_product(a, b, out):
    np.matmul(a, b, out=out)


RIGHT = Rung(1, "s1_right", "cpu", "", ("float16", "float32", "float64"), numpy_product)


def faulty(fault):
    """A rung that multiplies rightly, and then lets `fault(a, b, out)` spoil the result."""

    def compute(a, b, out):
        np.matmul(a, b, out=out)
        fault(a, b, out)

    return dataclasses.replace(RIGHT, name="s1_faulty", compute=compute)


FAULTS = {
    "one element off": lambda a, b, out: np.put(out, -1, out[-1, -1] + 0.25),
    "one nan": lambda a, b, out: out[:1, -1:].fill(np.nan),
    "one infinity": lambda a, b, out: out[-1:, :1].fill(np.inf),
    "all nan": lambda a, b, out: out.fill(np.nan),
    "last product dropped": lambda a, b, out: np.matmul(a[:, :-1], b[:-1], out=out),
    "first product twice": lambda a, b, out: np.add(out, np.outer(a[:, 0], b[0]), out=out),
    "columns swapped": lambda a, b, out: out.__setitem__(np.s_[:, [0, -1]], out[:, [-1, 0]]),
    "input changed": lambda a, b, out: b[:1, :1].fill(0),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("m", "n", "k"), [(5, 7, 3), (2, 3, 1500)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_the_check(fault, m, n, k, dtype):
    with pytest.raises(AssertionError, match=f"s1_faulty, m={m}, n={n}, k={k}, {dtype}, seed=[0-9]+"):
        product_checks.check(faulty(FAULTS[fault]), m, n, k, dtype, np.random.default_rng())


@pytest.mark.parametrize(
    ("compute", "size", "dtype"),
    [
        (lambda a, b, out: np.add(out, a @ b, out=out), 3, "float32"),
        (lambda a, b, out: np.matmul(a, b[:, :-1], out=out[:, :-1]), 3, "float32"),
        (lambda a, b, out: np.copyto(out, a.astype("f4") @ b.astype("f4")), 9, "float64"),
    ],
    ids=["adds to what out held", "leaves a column as it was", "sums in too low a precision"],
)
def test_a_product_that_is_wrong_from_the_start_fails_the_check(compute, size, dtype):
    with pytest.raises(AssertionError):
        product_checks.check(
            dataclasses.replace(RIGHT, compute=compute), size, size, size, dtype, np.random.default_rng()
        )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_right_rung_passes(dtype):
    rng = np.random.default_rng()
    for m, n, k in product_checks.shapes(rng, 40, 60):
        product_checks.check(RIGHT, m, n, k, dtype, rng)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_any_order_of_summation_stays_within_the_bound(dtype):
    """All terms positive and the largest first: rounding errors that are large and do not cancel."""
    a, b = (np.abs(x) for x in product_checks.inputs(4, 4, 400, dtype, 7))
    total = np.zeros((4, 4), dtype)
    for p in np.argsort(-a[0].astype("f8")):
        total += np.outer(a[:, p], b[p])
    assert total.dtype == dtype
    product_checks.assert_product(total, a, b)


def test_a_result_of_another_shape_fails():
    a, b = product_checks.inputs(2, 3, 4, "float64", 0)
    with pytest.raises(AssertionError, match=r"\(3, 2\), not \(2, 3\)"):
        product_checks.assert_product((a @ b).T, a, b)


def test_inputs_are_fresh_and_repeat_by_seed():
    seeds = []

    def record(a, b, out):
        seeds.append(a.tobytes())
        np.matmul(a, b, out=out)

    rng = np.random.default_rng()
    for _ in range(2):
        product_checks.check(dataclasses.replace(RIGHT, compute=record), 3, 3, 3, "float32", rng)
    assert seeds[0] != seeds[1]
    first, second = (product_checks.inputs(3, 4, 5, "float32", 11) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)
    assert [x.shape for x in first] == [(3, 5), (5, 4)]
    assert all(x.dtype == np.float32 and np.abs(x).min() >= 0.5 and np.abs(x).max() <= 1.5 for x in first)


def test_shapes_are_ragged_and_hold_0_and_1():
    drawn = product_checks.shapes(np.random.default_rng(), 30, 9)
    assert len(drawn) == 30
    assert {(0, 9, 2), (9, 0, 2), (2, 9, 0), (1, 1, 1)} <= set(drawn)
    assert all(0 <= size <= 9 for size in itertools.chain(*drawn))
    assert any(len(set(shape)) == 3 for shape in drawn[4:])
    assert product_checks.shapes(np.random.default_rng(), 2, 9) == drawn[:2]


def test_work_and_traffic_by_hand():
    assert product_checks.flops(2, 3, 4) == 48
    assert product_checks.flops(0, 3, 4) == 0
    assert product_checks.least_bytes(2, 3, 4, "float32") == 4 * (8 + 12 + 6)
    assert product_checks.least_bytes(2, 3, 4, np.float64) == 8 * (8 + 12 + 6)
