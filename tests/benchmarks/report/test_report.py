"""The report in a terminal of any width, as JSON, and what its cells, figures and axes say."""

import io
import itertools
import re

import pytest
from rich.console import Console

from minidist.benchmarks.harness import formats
from minidist.benchmarks.report import bars, curves, figures, page, printed, tables
from tests.helpers import measured

HOPELESS = measured.beside("numpy.matmul", 0.002, 2.0, 0.1)


def entry(name, median=0.002, group="Products", suite="x", **extra):
    return measured.entry(suite, group, name, median, measured.QUICK, **extra)


def line(series, size, gflops, **extra):
    """A point of a curve, beside NumPy."""
    name = f"{series.partition(' ')[2]}, {size}"
    return entry(f"{series}-{size}", label=name, series=series, size=size, gflops=gflops, **HOPELESS, **extra)


def goal(of, below):
    return {"of": of, "below": below}


EVERYTHING = measured.machine(
    line("1 slow", 64, 0.01, peer_gflops=50.0) | {"stats": entry("", 0.2)["stats"]},
    line("2 fast", 64, 25.0, peer_gflops=50.0),
    line("2 fast", 128, 30.0),
    entry("met", 0.004, "Goals", "y", goal=goal("median", 0.010)),
    entry("missed", 2.0, "Goals", "y", goal=goal("ratio", 1.5), **{**HOPELESS, "ratio": 1.9}),
    entry("steps", 0.03, "Training", "y", **HOPELESS, rows_per_s=12_345.0, bytes_per_step=483_328),
    entry("plain", 0.03, "Nothing to compare", "y"),
)
EVERYTHING["benchmarks"][0]["extra_info"]["ratio"] = 20_000.0


def shown(found, width):
    stream = io.StringIO()
    printed.show_machine(Console(file=stream, width=width, color_system=None), "m", found)
    return stream.getvalue()


def only(*entries):
    (section,) = tables.sections(measured.machine(*entries))
    return section


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


def test_sections_follow_suites_and_groups():
    assert [(s.title, len(s.entries)) for s in tables.sections(EVERYTHING)] == [
        ("Products", 3),
        ("Goals", 2),
        ("Training", 1),
        ("Nothing to compare", 1),
    ]


def test_goals_are_judged():
    assert tables.goals(EVERYTHING) == (1, 2)
    text = shown(EVERYTHING, 120)
    assert "met, < 10.0 ms" in text
    assert "missed, < 1.5" in text
    assert "1 of 2 goals met" in text


def test_one_peer_stands_in_the_heading_and_two_in_a_column():
    one = [column.heading for column in tables.sections(EVERYTHING)[0].columns()]
    two = only(entry("a", **HOPELESS), entry("b", **{**HOPELESS, "peer": "another"}))
    several = [column.heading for column in two.columns()]
    assert ("numpy.matmul" in one, "peer" in one) == (True, False)
    assert ("numpy.matmul" in several, "peer" in several) == (False, True)


def test_a_hopeless_ratio_has_no_false_precision():
    text = shown(EVERYTHING, 120)
    assert "20,000" in text
    assert "2.00 (1.90–2.10)" in text


def test_a_difference_has_its_sign_and_may_be_the_goal():
    slower, faster = (
        entry(name, seconds, beyond_peer=beyond, goal=goal("beyond_peer", 15e-6), **HOPELESS)
        for name, seconds, beyond in (("slower", 30e-6, 22e-6), ("faster", 6e-6, -2e-6))
    )
    found = measured.machine(slower, faster)
    text = shown(found, 120)
    for words in ("minus", "+22.0 µs", "-2.00 µs", "met, < 15.0 µs"):
        assert words in text
    assert tables.goals(found) == (1, 2)
    assert "faster at -0.13 times its limit" in bars.of_section(only(slower, faster).entries).alt


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


@pytest.mark.parametrize("width", [60, *range(78, 90), 100, 200])
def test_a_terminal_of_any_width_cuts_no_cell(width):
    text = shown(EVERYTHING, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert "2 fast-128" not in text  # the label, not the test's name
    assert "fast, 128" in text


def test_json_has_every_figure():
    found = printed.machine_as_json(EVERYTHING)
    assert found["goals"] == {"met": 1, "of": 2}
    row = found["sections"][0]["rows"][1]
    assert (row["label"], row["median"], row["gflops"], row["mode"]) == ("fast, 64", 0.002, 25.0, "quick")


def test_a_section_of_one_row_has_no_figure():
    html = page.page({"this": EVERYTHING, "other": EVERYTHING})
    assert html.count("<svg") == 2  # of each machine its products
    assert html.count("<figure") == 2 + 2  # and its goals
    assert "fast reaches 30.0" in html


def test_names_at_the_ends_of_lines_keep_apart():
    crowded = only(*(line(f"{i} line", 64, 10.0 + i / 100) for i in range(6)), line("6 far", 64, 0.01))
    drawn = curves.of_section(crowded).svg("crowded")
    heights = sorted(
        float(found[1]) for found in re.finditer(r'<text [^>]*?y="([\d.]+)"[^>]*>\d line</text>', drawn)
    )
    assert len(heights) == 6
    assert min(b - a for a, b in itertools.pairwise(heights)) > 8


def test_quick_and_full_results_stand_beside_each_other_with_their_dates():
    found = measured.machine(entry("a"), entry("b"))
    assert "run" not in [column.heading for column in tables.sections(found)[0].columns()]
    found["benchmarks"][1]["run"] = measured.FULL
    text = shown(found, 120)
    assert "full, 2025-02-03" in text
    assert "quick, " in text


def test_numpys_kernel_is_shown_beside_its_figures():
    found = measured.machine(entry("a", **HOPELESS))
    run = found["runs"][measured.QUICK]
    run["software"] = {**run["software"], "blas": {"name": "openblas", "architecture": "Haswell"}}
    assert "NumPy on openblas's Haswell kernel" in " ".join(shown(found, 140).split())
    run["software"]["blas"]["chosen_by"] = "OPENBLAS_CORETYPE"
    assert "kernel, which OPENBLAS_CORETYPE chose" in " ".join(shown(found, 140).split())
