"""The roofline's formula, and peaks as data."""

import dataclasses
import json
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from minidist.kernels.measure.peaks import Peaks, Roof, dtype_name
from tests.helpers.peaks import ALL, GPU, ONE, PEAKS

rates = st.floats(1e-3, 1e18)


def test_attainable_by_hand():
    """100 GFLOP/s over 20 GB/s: the ridge is at 5 FLOP/byte."""
    assert ONE.ridge() == 5
    assert ONE.ridge("float64") == 2.5
    assert ONE.attainable(0) == 0
    assert ONE.attainable(0.25) == 5e9
    assert ONE.attainable(5) == 100e9
    assert ONE.attainable(5000) == 100e9
    assert ONE.attainable(math.inf) == 100e9
    assert ONE.attainable(2.6, "float64") == 50e9
    assert ONE.attainable(2.4, np.float64) == 48e9
    assert GPU.attainable(100, "bfloat16") == 400e12


@given(peak=rates, bandwidth=rates, x=st.floats(0, 1e12))
def test_attainable_is_the_lower_of_both_bounds(peak, bandwidth, x):
    roof = Roof("", {"float32": peak}, bandwidth)
    y = roof.attainable(x)
    assert y <= peak
    assert y <= x * bandwidth
    assert y in (peak, x * bandwidth)
    assert (y == peak) == (x * bandwidth >= peak)
    np.testing.assert_allclose(roof.attainable(roof.ridge()), peak)


@pytest.mark.parametrize("dtype", ["float16", np.int32, "bfloat16"])
def test_a_dtype_that_was_not_measured_is_an_error(dtype):
    for ask in (ONE.peak, ONE.ridge, lambda dtype: ONE.attainable(1, dtype)):
        with pytest.raises(ValueError, match="one core were measured in float32, float64"):
            ask(dtype)


NO_INTENSITIES = [-1, math.nan, [1, -2], np.array([math.nan])]
NO_RATES = [0.0, -1.0, math.nan, math.inf, None, "1e9"]


@pytest.mark.parametrize(
    ("give", "values", "message"),
    [
        (ONE.attainable, NO_INTENSITIES, "intensity is .*: pass operations per byte, 0 or more"),
        (lambda x: Roof("x", {"float32": x}, 1.0), NO_RATES, "^the peak float32 of x is .*: pass a positive"),
        (lambda x: Roof("x", {}, x), NO_RATES, "^the peak bandwidth of x is .*: pass a positive"),
        (
            lambda share: dataclasses.replace(ONE, granted=share),
            [-0.1, 1.1, math.nan, "1", None],
            "granted is .*: pass a share of time, from 0.0 to 1.0",
        ),
        (lambda n: dataclasses.replace(PEAKS, cores=n), [0, -1, 1.5, "4"], "pass their number, 1 or more"),
    ],
    ids=["an intensity", "a peak", "a bandwidth", "a share of time", "a number of cores"],
)
def test_values_that_can_not_be_are_refused(give, values, message):
    for wrong in values:
        with pytest.raises(ValueError, match=message):
            give(wrong)


def test_roofs_are_asked_for_by_name():
    assert PEAKS.roof("one") is ONE
    assert PEAKS.roof("all") is ALL
    assert PEAKS.roofs == (ONE, ALL)
    with pytest.raises(ValueError, match=r"^cores is 'gpu': on this machine, pass 'one' or 'all'$"):
        PEAKS.roof("gpu")
    with_gpu = dataclasses.replace(PEAKS, gpu=GPU)
    assert with_gpu.roof("gpu") is GPU
    assert with_gpu.roofs == (ONE, ALL, GPU)
    with pytest.raises(ValueError, match="pass 'one' or 'all' or 'gpu'"):
        with_gpu.roof("2")
    assert dataclasses.replace(PEAKS, cores=1, all=ONE).roofs == (ONE,)


@pytest.mark.parametrize("gpu", [None, GPU])
def test_json_and_back(gpu):
    peaks = dataclasses.replace(PEAKS, gpu=gpu, all=dataclasses.replace(ALL, granted=0.5))
    assert Peaks.from_dict(json.loads(json.dumps(dataclasses.asdict(peaks)))) == peaks


def test_what_is_printed_has_units_and_says_if_others_ran():
    text = str(dataclasses.replace(PEAKS, gpu=GPU))
    assert text.splitlines() == [
        "a CPU, 4 cores, AVX2, measured 2026-01-31",
        "one core: 100 GFLOP/s float32, 50 GFLOP/s float64, 20 GB/s",
        "4 cores: 400 GFLOP/s float32, 200 GFLOP/s float64, 40 GB/s",
        "a GPU: 5e+04 GFLOP/s float32, 8e+05 GFLOP/s bfloat16, 4000 GB/s",
    ]
    assert not PEAKS.busy
    busy = dataclasses.replace(PEAKS, all=dataclasses.replace(ALL, granted=0.6))
    assert busy.busy
    assert "too low: measure(fresh=True) when idle" in str(busy)


def test_names_of_dtypes():
    for dtype in (np.float32, "f4", "float32", np.dtype("float32")):
        assert dtype_name(dtype) == "float32"
    assert dtype_name("tf32") == "tf32"
    assert dtype_name("bfloat16") == "bfloat16"
