"""Points of a roofline: figures by hand, and times of products whose time is known."""

import dataclasses
import math

import numpy as np
import pytest
import threadpoolctl

from minidist.kernels import CPU_LADDER, Rung
from minidist.kernels.measure import timing_in_turns
from minidist.kernels.measure.peaks import Roof
from minidist.kernels.measure.points import Point, intensity, median_gpu_seconds, median_seconds, product_name
from tests.helpers.clocks import Clock
from tests.helpers.peaks import ONE


def test_intensity_by_hand():
    assert intensity(600, 600, 600) == 100  # n / 6
    assert intensity(600, 600, 600, np.float64) == 50
    assert intensity(1, 1, 1, "float64") == 2 / 24
    assert intensity(2, 3, 4) == 48 / (4 * (8 + 12 + 6))


@pytest.mark.parametrize("m", [0, -1])
def test_an_empty_product_has_no_intensity(m):
    for shape in [(m, 5, 5), (5, m, 5), (5, 5, m)]:
        with pytest.raises(ValueError, match=r"^m, n, k are .*: pass 1 or more, as an empty product"):
            intensity(*shape)
        with pytest.raises(ValueError, match="pass 1 or more"):
            Point("x", *shape, "float32", 1.0, ONE)


def test_a_point_by_hand():
    """60 x 60 x 60 in float32: 432,000 FLOP, 43,200 bytes, 10 FLOP/byte; in 10 us, 43.2 GFLOP/s of 100."""
    point = Point("x", 60, 60, 60, "float32", 10e-6, ONE)
    assert point.bytes == 43_200
    assert point.intensity == 10
    assert point.rate == pytest.approx(43.2e9)
    assert point.attainable == 100e9
    assert point.share == pytest.approx(0.432)
    assert point.bound == "arithmetic"
    assert str(point) == (
        "x, 60 x 60 x 60, float32: 43.2 GFLOP/s, 43% of the 100 GFLOP/s that arithmetic allows "
        "at 10 FLOP/byte (one core)"
    )


def test_a_point_checks_itself():
    point = Point("x", 5, 5, 5, "float32", 1.0, ONE)
    for seconds in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="pass the time of one product, more than 0"):
            dataclasses.replace(point, seconds=seconds)
    with pytest.raises(ValueError, match="dtype is 'float16'"):
        dataclasses.replace(point, dtype="float16")


def test_the_median_is_of_the_calls_after_the_first(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing_in_turns, "time", clock)
    waits = iter([0.2, 0.1, 0.01, 0.03])

    def product(a, b):
        assert a.shape == (3, 5)
        assert b.shape == (5, 4)
        assert a.dtype == b.dtype == np.float64
        clock.sleep(next(waits))

    seconds = median_seconds(product, 3, 4, 5, "float64", threads=1, seconds=0)
    assert seconds == pytest.approx(0.03)
    assert next(waits, None) is None  # one call, and three that are timed


def test_short_calls_are_timed_for_as_long_as_was_asked(monkeypatch):
    clock, calls = Clock(), []
    monkeypatch.setattr(timing_in_turns, "time", clock)

    def product(a, b):
        calls.append(a)
        clock.sleep(1 / 64)

    assert median_seconds(product, 2, 2, 2, "float32", threads=1, seconds=2) == 1 / 64
    assert len(calls) == 1 + 2 * 64


def test_rungs_and_numpy_write_where_memory_is_already():
    outs = []

    def compute(a, b, out):
        outs.append(out)
        np.matmul(a, b, out=out)

    rung = Rung(1, "s1_x", "cpu", "", ("float32",), compute)
    median_seconds(rung, 3, 4, 5, "float32", threads=1, seconds=0)
    assert len({id(out) for out in outs}) == 1
    assert outs[0].shape == (3, 4)
    assert median_seconds(np.matmul, 3, 4, 5, "float32", threads=1, seconds=0) > 0


@pytest.mark.parametrize("threads", [1, 2])
def test_blas_gets_as_many_threads_as_the_roof_has_cores(threads):
    def limits():
        return [library["num_threads"] for library in threadpoolctl.threadpool_info()]

    seen = []
    before = limits()
    median_seconds(lambda a, b: seen.append(limits()), 2, 2, 2, "float32", threads=threads, seconds=0)
    assert before, "NumPy's BLAS is not known to threadpoolctl"
    assert all(count == threads for found in seen for count in found)
    assert limits() == before


def test_products_have_names():
    def mine(a, b):
        return a @ b

    assert product_name(CPU_LADDER[0]) == "s1_python_loops"
    assert product_name(np.matmul) == "numpy.matmul"
    assert product_name(np.dot) == "dot"
    assert product_name(mine) == "mine"


def test_what_arithmetic_is_done_in_does_not_change_the_bytes_that_move():
    for m, n, k in [(60, 60, 60), (2, 3, 4)]:
        assert intensity(m, n, k, "tf32") == intensity(m, n, k, "float32")
        assert intensity(m, n, k, "bfloat16") == intensity(m, n, k, "float16") == 2 * intensity(m, n, k)
    roof = Roof("a GPU", {"tf32": 400e12, "bfloat16": 800e12}, 4e12)
    assert Point("x", 8, 8, 8, "tf32", 1.0, roof).bytes == 3 * 64 * 4
    assert Point("x", 8, 8, 8, "bfloat16", 1.0, roof).bytes == 3 * 64 * 2


class Timer:
    """A GPU's clock that says how long calls took, of products of tensors in main memory."""

    device = "cpu"

    def __init__(self, seconds):
        self.given, self.waits = iter(seconds), 0

    def wait(self):
        self.waits += 1

    def seconds(self, program, calls=1):
        program()
        return next(self.given)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_on_a_gpu_products_get_tensors_and_its_clock_counts(dtype):
    seen = []

    def product(a, b):
        seen.append((tuple(a.shape), tuple(b.shape), str(a.dtype), bool((a != 0).all())))
        return a @ b

    timer = Timer([3.0, 1.0, 2.0])
    assert median_gpu_seconds(product, 5, 4, 3, dtype, timer, seconds=0) == 2.0
    assert seen == [((5, 3), (3, 4), f"torch.{dtype}", True)] * 4
    assert timer.waits == 1


def test_on_a_gpu_a_rung_writes_where_memory_is_already():
    outs = []

    def matmul(a, b, out):
        outs.append(out)

    rung = dataclasses.replace(CPU_LADDER[3])
    object.__setattr__(rung, "matmul", matmul)
    median_gpu_seconds(rung, 5, 4, 3, "float32", Timer([0.1] * 99), seconds=0.5)
    assert len(outs) == 1 + 5
    assert {(id(out), tuple(out.shape)) for out in outs} == {(id(outs[0]), (5, 4))}
