"""Measuring once, what an intensity allows, placing products, and the command."""

import dataclasses
import time

import numpy as np
import pytest

from minidist.kernels import CPU_LADDER, Rung
from minidist.kernels.cpu.support import bf16_instructions
from minidist.kernels.measure import peaks_file, roofline, timing_in_turns
from tests.helpers.clocks import Clock
from tests.helpers.fresh_python import output_of
from tests.helpers.peaks import ALL, GPU, ONE, PEAKS
from tests.helpers.products import runs_here


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """No cache of another's, and peaks that are counted, not measured; what is measured comes last."""
    monkeypatch.setenv("MINIDIST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(roofline, "_measured", {})
    rounds = []

    def roofs():
        rounds.append(len(rounds) + 1)
        return dataclasses.replace(ONE, bandwidth=float(rounds[-1])), ALL

    monkeypatch.setattr(roofline.cpu_peaks, "roofs", roofs)
    monkeypatch.setattr(roofline.gpu_peaks, "roof", lambda: None)
    for module in roofline, roofline.peaks_file:  # as PEAKS have
        monkeypatch.setattr(module, "available_cpus", lambda: range(4))
    return rounds


def forget():
    """As a new process does."""
    roofline._measured.clear()


def test_peaks_are_measured_once_and_kept(measured):
    first = roofline.measure()
    assert (first.one.bandwidth, first.all, first.gpu) == (1.0, ALL, None)
    assert first.machine == peaks_file.cpu_name()
    assert first.cores == len(roofline.available_cpus())
    assert time.strptime(first.date, "%Y-%m-%d")
    assert roofline.measure() == first
    forget()
    assert roofline.measure() == first
    assert measured == [1]


def test_a_spoilt_file_is_measured_again_and_replaced(measured):
    roofline.measure()
    forget()
    peaks_file.path().write_text("{")
    assert roofline.measure().one.bandwidth == 2.0
    forget()
    assert roofline.measure().one.bandwidth == 2.0
    assert measured == [1, 2]


def test_where_nothing_can_be_kept_the_process_remembers(measured, monkeypatch, tmp_path):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("MINIDIST_CACHE_DIR", str(tmp_path / "a file"))
    first = roofline.measure()
    assert roofline.measure() is first
    forget()
    roofline.measure()
    assert measured == [1, 2]


def test_a_gpu_that_fails_is_said_left_out_and_not_kept(measured, monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: no kernel image is available\nmore\nlines")

    monkeypatch.setattr(roofline.gpu_peaks, "roof", broken)
    with pytest.warns(
        UserWarning,
        match="^the GPU's peaks .* left out: CUDA error: no kernel image is available$",
    ):
        peaks = roofline.measure()
    assert peaks.gpu is None
    assert peaks.one.bandwidth == 1.0
    assert roofline.measure() is peaks
    forget()
    monkeypatch.setattr(roofline.gpu_peaks, "roof", lambda: GPU)
    assert roofline.measure().gpu == GPU


def test_attainable_is_that_of_the_roof_asked_for(measured):
    assert roofline.attainable(2, peaks=PEAKS) == 40e9
    assert roofline.attainable(2, np.float64, "all", PEAKS) == 80e9
    assert roofline.attainable(1e9, cores="all", peaks=PEAKS) == 400e9
    assert roofline.attainable(10, "bfloat16", "gpu", dataclasses.replace(PEAKS, gpu=GPU)) == 40e12
    np.testing.assert_array_equal(roofline.attainable([1, 100], peaks=PEAKS), [20e9, 100e9])
    assert measured == []
    assert roofline.attainable(5) == 5.0  # this machine's, at 1 byte/s
    assert measured == [1]


def slow_rung(seconds, device="cpu", sleep=time.sleep):
    def compute(a, b, out):
        sleep(seconds)

    return Rung(3, "s3_slow", device, "It sleeps.", ("float32", "float64"), compute)


def test_a_rung_of_known_rate_is_placed_where_it_belongs(monkeypatch):
    """100 x 200 x 300: 12 MFLOP; in 20 ms, 0.6 GFLOP/s."""
    clock = Clock()
    monkeypatch.setattr(timing_in_turns, "time", clock)
    point = roofline.place(slow_rung(0.02, sleep=clock.sleep), 100, 200, 300, peaks=PEAKS, seconds=0.05)
    assert (point.name, point.m, point.n, point.k, point.dtype) == ("s3_slow", 100, 200, 300, "float32")
    assert point.seconds == pytest.approx(0.02)
    assert point.rate == pytest.approx(0.6e9)
    assert point.bytes == 4 * (100 * 300 + 300 * 200 + 100 * 200)
    assert point.roof is ONE
    assert point.share == point.rate / 100e9


def test_blas_gets_the_cores_of_the_roof(monkeypatch):
    given = []
    monkeypatch.setattr(roofline, "median_seconds", lambda *arguments: given.append(arguments[5]) or 1.0)
    for cores in (None, "one", "all"):
        roofline.place(np.matmul, 8, 8, 8, cores=cores, peaks=PEAKS)
    assert given == [1, 1, 4]


def test_the_roof_is_the_one_asked_for_and_the_gpus_for_its_rungs():
    with_gpu = dataclasses.replace(PEAKS, gpu=GPU)
    quick = slow_rung(0)
    assert roofline.place(quick, 8, 8, 8, np.float64, cores="all", peaks=PEAKS, seconds=0).roof is ALL
    for cores, roof in (("one", ONE), ("all", ALL)):  # a rung knows its own
        step = dataclasses.replace(quick, cores=cores)
        assert roofline.place(step, 8, 8, 8, peaks=PEAKS, seconds=0).roof is roof
    on_gpu = slow_rung(0, "cuda")
    assert roofline.place(on_gpu, 8, 8, 8, peaks=with_gpu, seconds=0).roof is GPU
    with pytest.raises(ValueError, match="cores is 'gpu': on this machine"):
        roofline.place(on_gpu, 8, 8, 8, peaks=PEAKS)


def test_a_gpus_rung_is_timed_by_the_gpu_below_the_roof_of_its_arithmetic(monkeypatch):
    flops = {"float32": 50e12, "tf32": 400e12, "bfloat16": 800e12}
    peaks = dataclasses.replace(PEAKS, gpu=dataclasses.replace(GPU, flops=flops))
    asked = []

    def median_gpu_seconds(product, m, n, k, dtype, timer, seconds):
        asked.append((product.name, dtype, timer))
        return 1e-6

    monkeypatch.setattr(roofline.gpu_timer, "find", lambda: "its clock")
    monkeypatch.setattr(roofline, "median_gpu_seconds", median_gpu_seconds)
    dtypes = ("float32", "bfloat16")
    rungs = [
        Rung(number, f"s{number}_x", "cuda", "", dtypes, lambda a, b, c: None, tf32=number == 9)
        for number in (8, 9)
    ]
    points = [roofline.place(step, 64, 64, 64, dtype, peaks=peaks) for step in rungs for dtype in dtypes]
    assert [point.dtype for point in points] == ["float32", "bfloat16", "tf32", "bfloat16"]
    assert [point.attainable for point in points] == [point.intensity * 4e12 for point in points]
    assert asked == [(step.name, dtype, "its clock") for step in rungs for dtype in dtypes]


def test_what_is_wrong_is_said_before_anything_is_timed():
    def never(a, b):
        raise AssertionError

    for arguments, message in [
        ((0, 5, 5), "m, n, k are 0, 5, 5"),
        ((5, 5, 5, "float16"), "dtype is 'float16'"),
        ((5, 5, 5, "float32", "two"), "cores is 'two'"),
    ]:
        with pytest.raises(ValueError, match=message):
            roofline.place(never, *arguments, peaks=PEAKS)


def test_every_rung_can_be_placed():
    for rung in filter(runs_here, CPU_LADDER):
        point = roofline.place(rung, 5, 7, 3, peaks=PEAKS, seconds=0)
        assert point.name == rung.name
        assert 0 < point.share < 100


def test_rung_8_is_placed_below_the_matrix_unit_with_the_bytes_of_float32(monkeypatch):
    monkeypatch.setattr(roofline, "median_seconds", lambda *arguments: 1e-6)
    with_unit = dataclasses.replace(
        PEAKS, all=dataclasses.replace(ALL, flops={**ALL.flops, "bfloat16": 8e11})
    )
    rung = CPU_LADDER[7]
    point, other = (roofline.place(rung, 30, 30, 30, peaks=peaks) for peaks in (with_unit, PEAKS))
    assert (point.dtype, point.stored, point.bytes) == ("bfloat16", "float32", 3 * 4 * 900)
    assert point.roof.peak(point.dtype) == 8e11
    assert (other.dtype, other.stored, other.intensity) == ("float32", "", point.intensity)


def test_the_command_prints_the_peaks_and_the_points(measured, capsys, tmp_path):
    file = tmp_path / "roofline.svg"
    assert roofline.main(["--place", "s4", "16", "--place", "numpy", "16", "--plot", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "100.0" in printed  # GFLOP/s of one core
    assert "400.0" in printed
    assert "ridge, FLOP/byte" in printed
    assert "\ns4_loop_order, 16 x 16 x 16, float32: " in printed
    assert "\nnumpy.matmul, 16 x 16 x 16, float32: " in printed
    assert "s4_loop_order" in file.read_text()
    assert measured == [1]
    assert roofline.main(["--fresh"]) == 0
    assert measured == [1, 2]


def test_the_command_says_which_rung_this_cpu_cannot_run(measured, monkeypatch, capsys):
    monkeypatch.setattr(bf16_instructions, "matrix_unit", lambda: "")
    assert roofline.main(["--place", "s8", "2"]) == 2
    assert capsys.readouterr().err.startswith("this CPU has no bf16 products")


def test_the_command_places_a_rung_in_a_dtype_that_it_takes(measured, monkeypatch, capsys):
    flops = {**GPU.flops, "tf32": 400e12}
    monkeypatch.setattr(roofline.gpu_peaks, "roof", lambda: dataclasses.replace(GPU, flops=flops))
    monkeypatch.setattr(roofline.gpu_timer, "find", lambda: "its clock")
    monkeypatch.setattr(roofline, "median_gpu_seconds", lambda *arguments: 1e-6)
    pytest.importorskip("numba_cuda")
    names = ["s8_warp_tile", "s9_tensor_core", "s10_hopper"]
    assert roofline.main([word for name in names for word in ("--place", name, "64")]) == 0
    printed = capsys.readouterr().out
    for name, dtype in zip(names, ("float32", "tf32", "bfloat16"), strict=True):
        assert f"{name}, 64 x 64 x 64, {dtype}: " in printed


def test_the_command_says_that_the_machine_was_busy(measured, monkeypatch, capsys):
    busy = dataclasses.replace(ALL, granted=0.5)
    monkeypatch.setattr(roofline.cpu_peaks, "roofs", lambda: (ONE, busy))
    monkeypatch.setattr(roofline.gpu_peaks, "roof", lambda: GPU)
    assert roofline.main([]) == 0
    printed = capsys.readouterr().out
    assert "--fresh" in printed
    assert "a GPU" in printed
    assert "bfloat16, GFLOP/s" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--place", "s99", "5"], "unknown rung 's99'"),
        (["--place", "s4", "0"], "m, n, k are 0, 0, 0"),
        (["--place", "s4", "many"], "N is 'many': pass a whole number, as in --place s4 512"),
        (["--plot", "/nowhere/at/all.png"], "No such file or directory"),
        (["--plot", "x.unknown"], "not supported"),
    ],
)
def test_what_a_person_mistypes_is_answered_in_one_line(measured, capsys, arguments, message):
    assert roofline.main(arguments) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    # Where only the drawing fails, what was measured is said all the same.
    assert bool(said.out) == ("--plot" in arguments)


def test_ctrl_c_ends_in_one_line(measured, monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(roofline.cpu_peaks, "roofs", interrupted)
    assert roofline.main([]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_nothing_heavy_is_imported_until_it_is_used():
    code = (
        "import sys, minidist.kernels.measure.roofline as r\n"
        "heavy = {'numba', 'llvmlite', 'matplotlib', 'torch', 'rich', 'threadpoolctl'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    assert output_of(code) == "[]"
