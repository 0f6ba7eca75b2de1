"""A terminal of any width, and what numbers, axes and names in figures look like."""

import io
import itertools
import re

import pytest
from rich.console import Console

from minidist.benchmarks.harness import formats
from minidist.benchmarks.report import curves, figures, ladders, printed, tables
from minidist.kernels.cuda import RUNGS
from tests.benchmarks.report.test_whole_report import MACHINES, cuda
from tests.helpers import measured


def shown(found, width):
    stream = io.StringIO()
    printed.show_machine(Console(file=stream, width=width, color_system=None), "m", found)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (formats.seconds, 3.2e-9, "3.20 ns"),
        (formats.seconds, 5.68e-6, "5.68 µs"),
        (formats.seconds, 0.00123, "1.23 ms"),
        (formats.seconds, 0.999, "999 ms"),
        (formats.seconds, 1.0, "1.00 s"),
        (formats.seconds, 123.4, "123 s"),
        (formats.size, 0, "0 B"),
        (formats.size, 999, "999 B"),
        (formats.size, 1200, "1.20 KB"),
        (formats.size, 483_328, "483 KB"),
        (formats.size, 2.5e6, "2.50 MB"),
        (formats.size, 3e9, "3.00 GB"),
        (formats.number, 0, "0"),
        (formats.number, 0.00973, "0.00973"),
        (formats.number, 0.1, "0.100"),
        (formats.number, 9.999, "10.0"),
        (formats.number, 28.34, "28.3"),
        (formats.number, 99.99, "100"),
        (formats.number, 10_349, "10,300"),
    ],
)
def test_numbers_have_units_and_three_digits(form, value, text):
    assert form(value) == text


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.5, 2e4, [1, 10, 100, 1000, 10_000]),
        (20, 80, [20, 50]),
        (25e4, 75e4, [300_000, 500_000, 700_000]),
        (900, 1200, [1000]),
    ],
)
def test_a_logarithmic_axis_has_round_numbers(low, high, ticks):
    assert figures.round_ticks(low, high) == ticks


@pytest.mark.parametrize("width", [60, *range(78, 90, 2), 200])
def test_a_terminal_of_any_width_cuts_no_cell(width):
    text = shown(MACHINES["made up"], width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert "s6_tile, 2048" in text  # the label, not the test's name
    assert "1 of 2 goals met" in text
    assert "kernel, which OPENBLAS_CORETYPE chose" in " ".join(text.split())


def heights(drawn, name):
    """Where the names in a figure stand, from the top."""
    found = re.finditer(rf'<text [^>]*?y="([\d.]+)"[^>]*>(?:{name})', drawn)
    return sorted(float(each[1]) for each in found)


def test_names_at_the_ends_of_lines_keep_apart():
    points = {f"{i} line": 10.0 + i / 100 for i in range(6)} | {"6 far": 0.01}
    lines = [
        measured.entry("x", "Products", name, 0.1, series=name, size=64, gflops=rate)
        for name, rate in points.items()
    ]
    (section,) = tables.sections(measured.machine(*lines))
    crowded = heights(curves.of_section(section).svg("x"), r"\d line</text>")
    rungs = [cuda(rung, "float32", 4096, 50.0, 20e3 + i) for i, rung in enumerate(RUNGS)]
    roof = ladders.cuda_roofline(ladders.cuda_ladder("x", measured.machine(*rungs))).svg("roof")
    beside = heights(roof, r"\d+ [a-z1-2 ]+, float32|float32 peak")
    assert (len(crowded), len(beside)) == (6, 1 + len(RUNGS))
    for several in (crowded, beside):
        assert min(b - a for a, b in itertools.pairwise(several)) > 8
