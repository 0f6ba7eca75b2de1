"""The CUDA ladder in the report: figures that were measured, and words where there are none."""

import io
import itertools
import re

import pytest
from rich.console import Console

from minidist.benchmarks.harness import results
from minidist.benchmarks.harness import run_suites as benchmarks
from minidist.benchmarks.report import curves, findings, ladders, page, printed, tables
from minidist.kernels.cuda import RUNGS
from tests.benchmarks.report.test_page import well_formed
from tests.helpers import measured

FIGURES = re.compile(r"\d+(?:\.\d+)?%")
PEAKS = {"float32": 50e3, "bfloat16": 800e3}


def entry(rung, dtype, size, percent, gflops=1000.0, **extra):
    peak = PEAKS.get(dtype)
    peaks = (
        {"peak_gflops": peak, "peak_gb_per_s": 4e3, "percent_of_gpu_peak": 100 * gflops / peak}
        if peak
        else {}
    )
    name = f"rung[{rung}-{dtype}-{size}{extra.get('order', '')}]"
    figures = {
        "label": f"{rung}, {size}",
        "rung": rung,
        "dtype": dtype,
        "size": size,
        "gflops": gflops,
        "peer_gflops": 100 * gflops / percent,
        "percent_of_peer": percent,
        **measured.beside("torch.matmul", 0.002, 100 / percent, 0.01),
        **peaks,
        **extra,
    }
    return measured.entry("cuda", f"CUDA ladder, {dtype}", name, 0.002, measured.QUICK, **figures)


def with_gpu(*entries):
    found = measured.machine(*entries)
    gpu = {"name": "NVIDIA Made Up", "driver": "580.1", "memory_bytes": 2**36, "compute_capability": "9.0"}
    found["machine_info"]["gpus"] = [gpu]
    return found


SOME = with_gpu(
    entry("s1_naive", "float32", 1024, 1.5, 600.0),
    entry("s1_naive", "float32", 2048, 1.25, 625.0),
    entry("s8_warp_tile", "float32", 1024, 83.0, 30e3),
    entry("s8_warp_tile", "float32", 2048, 91.0, 45e3),
    entry("s8_warp_tile", "float32", 4096, 103.0, 49e3),
    entry("s9_tensor_core", "tf32", 2048, 64.0, 250e3),
    entry("s9_tensor_core", "bfloat16", 2048, 66.0, 500e3),
    entry("s9_tensor_core", "bfloat16", 4096, 7.5, 510e3, order="nt", label="transposed"),
)
NONE = measured.machine(entry("s1_naive", "float32", 1024, 1.5) | {"suite": "bench_x"})


def shown(climbed, width=100):
    stream = io.StringIO()
    printed.show_cuda_ladder(Console(file=stream, width=width, color_system=None), climbed)
    return stream.getvalue()


def row_of(text, rung):
    return [line for line in text.splitlines() if line.strip().startswith(rung)]


def test_what_was_measured_stands_in_its_place():
    climbed = ladders.cuda_ladder("some", SOME)
    assert climbed.sizes == [1024, 2048, 4096]
    assert climbed.common_size == 2048
    text = shown(climbed)
    assert text.startswith("The CUDA ladder against torch.matmul, NVIDIA Made Up")
    assert row_of(text, "s1_naive")[0].split() == [
        "s1_naive", "float32", "1.50%", "1.25%", "–", "625", "1.25%",
    ]  # fmt: skip
    assert row_of(text, "s8_warp_tile")[0].split()[2:] == ["83.0%", "91.0%", "103%", "49,000", "98.0%"]
    assert [line.split()[1:5] for line in row_of(text, "s9_tensor_core")] == [
        ["TF32", "–", "64.0%", "–"],
        ["bfloat16", "–", "66.0%", "–"],
    ]
    assert "quick run of 2025-01-01, commit 1a2b3c4" in text


def test_a_rung_that_was_not_measured_says_so_and_has_no_figure():
    text = shown(ladders.cuda_ladder("some", SOME))
    for rung in set(RUNGS) - {"s1_naive", "s8_warp_tile", "s9_tensor_core"}:
        (line,) = row_of(text, rung)
        assert "not measured" in line
        assert not re.search(r"\d", line.removeprefix(f" {rung}").replace(rung, ""))


def test_where_nothing_was_measured_a_sentence_says_so():
    stream = io.StringIO()
    printed.show(Console(file=stream, width=100, color_system=None), {"a": NONE})
    html = page.page({"a": NONE, "b": NONE})
    for text in (stream.getvalue(), html):
        assert text.count("The CUDA ladder is not measured yet") == 1
        assert "minidist bench cuda" in text
        assert "s10_hopper" not in text
    assert ladders.first_cuda_ladder({"a": NONE}) is None
    well_formed(html)


def test_the_first_machine_with_figures_is_shown():
    assert ladders.first_cuda_ladder({"a": NONE, "b": SOME}).machine == "b"
    assert ladders.cuda_ladder("a", NONE) is None


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_has_the_leading_columns(width):
    text = shown(ladders.cuda_ladder("some", SOME), width)
    table = [line for line in text.splitlines() if "s8_warp_tile" in line]
    assert max(map(len, table)) <= width
    assert "float32" in table[0]
    assert "…" not in text


def test_a_newer_run_replaces_an_older_one():
    newer = {**entry("s1_naive", "float32", 1024, 2.0), "run": measured.FULL}
    found = with_gpu(entry("s1_naive", "float32", 1024, 1.5), newer)
    climbed = ladders.cuda_ladder("some", found)
    assert climbed.rows[0].percent(1024) == 2.0
    assert climbed.provenance == "full run of 2025-02-03, commit 5d6e7f8+"


def test_bars_are_at_the_size_that_most_have():
    drawn = ladders.cuda_bars(ladders.cuda_ladder("some", SOME))
    assert "1 naive, float32 1.25%" in drawn.alt
    assert "8 warp tile, float32 91.0%" in drawn.alt
    assert "9 tensor core, TF32 64.0%" in drawn.alt
    assert "10 hopper not measured" in drawn.alt
    assert "n = 2048" in drawn.caption
    other = ladders.cuda_ladder(
        "x", with_gpu(*SOME["benchmarks"], entry("s10_hopper", "bfloat16", 1024, 88.0))
    )
    assert "10 hopper, bfloat16 88.0%, n = 1024" in ladders.cuda_bars(other).alt


def test_the_roofline_has_the_peaks_and_the_rungs_that_were_measured_below_them():
    drawn = ladders.cuda_roofline(ladders.cuda_ladder("some", SOME))
    assert "8 warp tile, float32 49,000 of 50,000" in drawn.alt
    assert "TF32" not in drawn.alt  # whose peak nobody measured
    for words in ("float32 peak 50,000", "bfloat16 peak 800,000", "4,000 GB/s", "1 naive, float32"):
        assert words in drawn.svg("roof")
    without = with_gpu(entry("s9_tensor_core", "tf32", 2048, 64.0, 250e3))
    assert ladders.cuda_roofline(ladders.cuda_ladder("x", without)) is None


def test_names_beside_the_roofline_keep_apart():
    rungs = [entry(rung, "float32", 4096, 50.0, 20e3 + i) for i, rung in enumerate(RUNGS)]
    drawn = ladders.cuda_roofline(ladders.cuda_ladder("x", with_gpu(*rungs))).svg("roof")
    heights = sorted(
        float(found[1])
        for found in re.finditer(
            r'<text [^>]*?y="([\d.]+)"[^>]*>(?:\d+ [a-z1-2 ]+, float32|float32 peak)', drawn
        )
    )
    assert len(heights) == 1 + len(RUNGS)
    assert min(b - a for a, b in itertools.pairwise(heights)) > 8


def test_the_page_of_a_machine_with_a_gpu_begins_with_the_ladder():
    html = page.page({"gpu": SOME, "other": NONE})
    assert "not measured" in html  # the rungs between
    assert "not measured yet" not in html
    assert html.index("The CUDA ladder against torch.matmul, NVIDIA Made Up") < html.index(
        "CUDA ladder, float32"
    )
    for words in ("580.1", "compute capability 9.0", "103%"):
        assert words in html
    figures = [attributes for tag, attributes in well_formed(html) if tag == "svg"]
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in figures)
    assert not re.findall(r"#000[01]f\d", html)
    assert page.page({"gpu": SOME, "other": NONE}) == html


def test_a_finding_names_the_best_rung_in_each_arithmetic():
    (found,) = findings.findings("gpu", SOME)
    assert found.text == (
        "The CUDA ladder, written in Python, reaches 103% in float32, 66.0% in bfloat16, 64.0% in TF32 of "
        "torch's speed."
    )
    assert (found.slug, len(found.rests_on)) == ("gpu", 3)


def test_results_of_a_suite_that_cannot_run_now_stay():
    assert benchmarks.left_out_before(SOME, {"cuda"}) == [each["fullname"] for each in SOME["benchmarks"]]
    assert benchmarks.left_out_before(NONE, {"cuda"}) == benchmarks.left_out_before(None, {"cuda"}) == []
    assert benchmarks.left_out_before(SOME, {"devices"}) == []


def test_rates_over_less_than_a_decade_have_an_axis_too():
    near = [
        entry("s8_warp_tile", "float32", size, 90.0, rate, series="8 warp tile")
        for size, rate in ((1024, 31e3), (2048, 45e3))
    ]
    (section,) = tables.sections(with_gpu(*near))
    drawn = curves.of_section(section).svg("x")
    assert len(re.findall(r">(?:30|50),000<", drawn)) >= 1
    assert results.newest(with_gpu(*near))
