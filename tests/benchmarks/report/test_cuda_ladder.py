"""The CUDA ladder in the report: where it stands, and words where nothing was measured."""

import copy
import io

import pytest
from rich.console import Console

from minidist.benchmarks.harness import run_suites as benchmarks
from minidist.benchmarks.report import ladders, page, printed
from minidist.kernels.cuda import RUNGS
from tests.benchmarks.report.test_page import well_formed
from tests.benchmarks.report.test_whole_report import CUDA, cuda
from tests.helpers import measured

SOME, NONE = measured.machine(*CUDA), measured.machine({**CUDA[0], "suite": "bench_x"})


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_has_the_leading_columns(width):
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None)
    printed.show_cuda_ladder(console, ladders.cuda_ladder("some", SOME))
    table = [line for line in stream.getvalue().splitlines() if "s8_warp_tile" in line]
    assert max(map(len, table)) <= width
    assert "float32" in table[0]
    assert "…" not in stream.getvalue()


def test_where_nothing_was_measured_a_sentence_says_so():
    stream = io.StringIO()
    printed.show(Console(file=stream, width=100, color_system=None), {"a": NONE})
    html = page.page({"a": NONE, "b": NONE})
    for text in (stream.getvalue(), html):
        assert text.count("The CUDA ladder is not measured yet") == 1
        assert "minidist bench cuda" in text
        assert "s10_hopper" not in text
    assert ladders.first_cuda_ladder({"a": NONE}) is None
    assert ladders.first_cuda_ladder({"a": NONE, "b": SOME}).machine == "b"
    well_formed(html)


def test_a_newer_run_replaces_an_older_one():
    newer = {**copy.deepcopy(CUDA[0]), "run": measured.FULL}
    newer["extra_info"]["percent_of_peer"] = 2.0
    climbed = ladders.cuda_ladder("some", measured.machine(CUDA[0], newer))
    assert climbed.rows[0].percent(1024) == 2.0
    assert climbed.provenance == "full run of 2025-02-03, commit 5d6e7f8+"
    assert climbed.device == "a GPU"  # as in a file that does not name it


def test_no_roofline_without_a_peak():
    climbed = ladders.cuda_ladder("x", measured.machine(cuda("s9_tensor_core", "tf32", 2048, 64.0, 250e3)))
    assert ladders.cuda_roofline(climbed) is None
    assert len(climbed.rows) == len(RUNGS)


def test_results_of_a_suite_that_cannot_run_now_stay():
    assert benchmarks.left_out_before(SOME, {"cuda"}) == [each["fullname"] for each in CUDA]
    assert benchmarks.left_out_before(NONE, {"cuda"}) == benchmarks.left_out_before(None, {"cuda"}) == []
    assert benchmarks.left_out_before(SOME, {"devices"}) == []
