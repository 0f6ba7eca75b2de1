"""What is drawn is what was measured, and no name lies on another."""

import dataclasses
import itertools
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from minidist.kernels.measure import roofline
from minidist.kernels.measure.peaks import Peaks, Roof
from tests.helpers.peaks import GPU, ONE

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ALL = Roof("2 cores", {"float32": 200e9, "float64": 100e9}, 25e9)
PEAKS = Peaks("a CPU", "AVX2", 2, "2026-01-31", ONE, ALL)
WITH_GPU = dataclasses.replace(PEAKS, gpu=GPU)
NAMES = [f"s{i}_some_rung" for i in range(1, 8)]


@pytest.fixture(autouse=True)
def no_figure_stays_open():
    plt.close("all")
    yield
    plt.close("all")


def point(name, n, rate, dtype="float32", cores="one", peaks=PEAKS):
    return roofline.point(name, 2 * n**3 / rate, n, n, n, dtype, cores, peaks)


def ladder(rng):
    """Seven rungs and NumPy at several sizes, some as fast as others."""
    rates = [*np.geomspace(1e7, 90e9, 4), 80e9, 85e9, 90e9]
    points = [
        point(name, n, rate * rng.uniform(0.8, 1.0))
        for name, rate in zip(NAMES, rates, strict=True)
        for n in (64, 128, 256, 512)
    ]
    return [*points, *(point("numpy.matmul", n, 150e9, cores="all") for n in (64, 512, 1024))]


def line(axes, label):
    return next(found for found in axes.lines if found.get_label() == label)


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_the_matrix_unit_is_a_ceiling_beside_float32():
    peaks = dataclasses.replace(PEAKS, one=dataclasses.replace(ONE, flops={**ONE.flops, "bfloat16": 2e11}))
    axes = roofline.plot(peaks=peaks)
    assert line(axes, "one core, bfloat16").get_data()[1][-1] == 200
    assert line(axes, "2 cores, float32").get_data()[1][-1] == 200  # its matrix unit was not measured
    assert len([found for found in axes.lines if "bfloat16" in str(found.get_label())]) == 1
    assert not any("bfloat16" in text for text in texts(roofline.plot(dtype="float64", peaks=peaks)))


def test_roofs_go_through_their_bounds(tmp_path):
    axes = roofline.plot(peaks=PEAKS, path=tmp_path / "x.png")
    for roof in (ONE, ALL):
        x, y = line(axes, roof.name).get_data()
        np.testing.assert_allclose(y, roof.attainable(x) / 1e9)
        assert roof.ridge() in x
        assert x[0] <= axes.get_xlim()[0]
        assert x[-1] >= axes.get_xlim()[1]
    assert "one core: 100 GFLOP/s, ridge at 5 FLOP/byte" in texts(axes)
    assert "2 cores: 200 GFLOP/s, ridge at 8 FLOP/byte" in texts(axes)
    assert {"20 GB/s", "25 GB/s"} <= set(texts(axes))
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_xlabel() == "arithmetic intensity, FLOP/byte"
    assert axes.get_ylabel() == "GFLOP/s"
    assert "a CPU" in axes.get_title(loc="left")


def test_points_stand_where_they_were_measured():
    points = [point("a", 512, 40e9), point("a", 64, 20e9), point("b", 64, 5e9)]
    axes = roofline.plot(points, peaks=PEAKS)
    x, y = line(axes, "a").get_data()
    np.testing.assert_allclose(x, [64 / 6, 512 / 6])
    np.testing.assert_allclose(y, [20, 40])
    np.testing.assert_allclose(line(axes, "b").get_data(), [[64 / 6], [5]])
    assert {"a: 40 GFLOP/s, 40%", "b: 5 GFLOP/s, 5%", "n=64", "512"} <= set(texts(axes))
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    for each in points:
        assert left < each.intensity < right
        assert bottom < each.rate / 1e9 < top
    # One point need not be in a list.
    assert "b: 5 GFLOP/s, 5%" in texts(roofline.plot(points[2], peaks=PEAKS))


def test_the_roofs_are_those_of_the_points():
    def roofs(points, **options):
        axes = roofline.plot(points, **options)
        return {found.get_label() for found in axes.lines if len(found.get_xdata()) == 3}

    assert roofs((), peaks=PEAKS) == {"one core", "2 cores"}
    assert roofs((), peaks=dataclasses.replace(PEAKS, cores=1)) == {"one core"}
    assert roofs((), peaks=WITH_GPU) == {"one core", "2 cores", "a GPU"}
    assert roofs([point("x", 64, 1e9)], peaks=WITH_GPU) == {"one core", "2 cores"}
    assert roofs([point("x", 64, 1e9, cores="gpu", peaks=WITH_GPU)], peaks=WITH_GPU) == {"a GPU"}
    both = [point("x", 64, 1e9), point("x", 64, 1e9, "float64")]
    assert len(roofs(both, peaks=PEAKS)) == 4
    axes = roofline.plot(both, peaks=PEAKS)
    assert "one core, float64: 50 GFLOP/s, ridge at 2.5 FLOP/byte" in texts(axes)
    assert "x, float64: 1 GFLOP/s, 2%" in texts(axes)
    assert "2 cores: 100 GFLOP/s, ridge at 4 FLOP/byte" in texts(roofline.plot(dtype="float64", peaks=PEAKS))


def test_no_text_lies_on_another():
    rng = np.random.default_rng()
    figures = {
        "one dtype": (ladder(rng), PEAKS),
        "two dtypes": (ladder(rng) + [point("s6", n, 40e9, "float64") for n in (64, 128, 512)], PEAKS),
        "all alike": ([point(name, 64, 50e9) for name in NAMES], PEAKS),
        "GPU and CPU": ([*ladder(rng), point("c1", 4096, 9e12, cores="gpu", peaks=WITH_GPU)], WITH_GPU),
        "a vector": ([roofline.point("gemv", 1e-3, 1024, 1, 1024, peaks=PEAKS)], PEAKS),
        "nothing": ([], WITH_GPU),
    }
    for name, (points, peaks) in figures.items():
        axes = roofline.plot(points, peaks=peaks)
        axes.figure.draw_without_rendering()
        # Rotated texts, the bandwidths, have boxes much larger than they are.
        level = [text for text in axes.texts if text.get_rotation() == 0]
        # An annotation's own method adds the line to what it names, which may pass below another name.
        boxes = [(text.get_text(), Text.get_window_extent(text)) for text in level if text.get_text()]
        for text, box in boxes:
            assert axes.figure.bbox.containsy(box.y0), (name, text)
            assert axes.figure.bbox.containsy(box.y1), (name, text)
            assert axes.figure.bbox.containsx(box.x1), (name, text)
        assert len(boxes) >= len({(point.name, point.dtype) for point in points}) + 2
        for (first, a), (second, b) in itertools.combinations(boxes, 2):
            apart = a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0
            assert apart, (name, first, second, a, b)


def test_names_keep_the_order_of_what_they_name():
    points = ladder(np.random.default_rng())
    axes = roofline.plot(points, peaks=PEAKS)
    names = [text for text in axes.texts if "GFLOP/s" in text.get_text()]
    assert len(names) == 10  # seven rungs, NumPy, two roofs
    by_place = sorted(names, key=lambda name: name.get_position()[1])
    assert by_place == sorted(names, key=lambda name: name.xy[1])


def test_a_saved_figure_is_whole_and_unknown_to_pyplot(tmp_path):
    file = tmp_path / "x.png"
    axes = roofline.plot(ladder(np.random.default_rng()), file, peaks=PEAKS)
    assert plt.get_fignums() == []
    pixels = plt.imread(file)
    assert pixels.shape[1] > 1000
    # White at every edge: nothing was cut.
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        np.testing.assert_array_equal(edge[..., :3], 1)
    assert isinstance(axes.figure, Figure)


def test_a_notebook_gets_one_figure():
    axes = roofline.plot(peaks=PEAKS)
    assert plt.get_fignums() == [axes.figure.number]


def test_an_error_leaves_no_figure_behind():
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        roofline.plot(dtype="int8", peaks=PEAKS)
    assert plt.get_fignums() == []


def test_given_axes_are_drawn_into():
    figure, (first, second) = plt.subplots(1, 2)
    assert roofline.plot(peaks=PEAKS, axes=second) is second
    assert not first.lines
    assert second.lines
    assert plt.get_fignums() == [figure.number]


def test_a_dark_theme_changes_nothing():
    before = dict(plt.rcParams)
    with matplotlib.style.context("dark_background"):
        axes = roofline.plot(ladder(np.random.default_rng()), peaks=PEAKS)
        assert to_rgb(axes.figure.get_facecolor()) == to_rgb(axes.get_facecolor()) == (1, 1, 1)
        for text in [axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels()]:
            assert max(to_rgb(text.get_color())) < 0.3
    assert dict(plt.rcParams) == before


def test_without_matplotlib_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ImportError, match=r"^matplotlib is missing, which draws: pip install 'minidist\[bench\]'$"
    ):
        roofline.plot(peaks=PEAKS)


def test_the_lines_of_both_ladders_are_told_apart():
    """Seventeen lines: where a colour comes again, its mark is another."""
    points = [point(f"s{i}_rung", n, 1e9 * i) for i in range(1, 18) for n in (64, 128)]
    axes = roofline.plot(points, peaks=PEAKS, axes=Figure().subplots())
    looks = {(found.get_color(), found.get_marker()) for found in axes.lines if "rung" in found.get_label()}
    assert len(looks) == 17
