"""All that the report says about two made-up machines, beside the files in expected/: every figure and word.

Read the difference when the report changes on purpose, then write the files anew:

    MINIDIST_EXPECTED=1 pytest tests/benchmarks/report/test_whole_report.py
"""

from __future__ import annotations

import html
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minidist.benchmarks.harness import columns, results
from minidist.benchmarks.report import page, printed, tables
from minidist.benchmarks.report.figures import Plot
from tests.helpers import measured
from tests.helpers.measured import beside, entry

EXPECTED = Path(__file__).parent / "expected"
BLAS = {"name": "openblas", "version": "0.3", "architecture": "Haswell", "chosen_by": "OPENBLAS_CORETYPE"}
PEAKS = {"float32": 50e3, "bfloat16": 800e3}


def cuda(rung: str, dtype: str, size: int, percent: float, gflops: float, **extra: Any) -> dict[str, Any]:
    """A product of the CUDA ladder beside torch.matmul."""
    if dtype in PEAKS:
        extra |= {"peak_gflops": PEAKS[dtype], "peak_gb_per_s": 4e3}
        extra["percent_of_gpu_peak"] = 100 * gflops / PEAKS[dtype]
    figures = {"label": f"{rung}, {size}", "rung": rung, "dtype": dtype, "size": size, "gflops": gflops}
    figures |= {"percent_of_peer": percent, **beside("torch.matmul", 0.002, 100 / percent, 0.01), **extra}
    name = f"rung[{rung}-{dtype}-{size}{extra.get('order', '')}]"
    return entry("cuda", f"CUDA ladder, {dtype}", name, 0.002, measured.QUICK, **figures)


CUDA = [
    cuda("s1_naive", "float32", 1024, 1.5, 600.0),
    cuda("s1_naive", "float32", 2048, 1.25, 625.0),
    cuda("s8_warp_tile", "float32", 1024, 83.0, 30e3, series="8 warp tile"),
    cuda("s8_warp_tile", "float32", 4096, 103.0, 49e3, series="8 warp tile"),
    cuda("s9_tensor_core", "tf32", 2048, 64.0, 250e3),
    cuda("s9_tensor_core", "bfloat16", 2048, 66.0, 500e3),
    cuda("s9_tensor_core", "bfloat16", 4096, 7.5, 510e3, order="nt", label="transposed"),
    cuda("s10_hopper", "bfloat16", 1024, 88.0, 520e3),
]


def unit(cores: str, rate: float, **extra: Any) -> dict[str, Any]:
    """A product of the matrix unit."""
    extra |= {"label": f"bf16, 1024, {cores} beside numpy.matmul", "gflops": rate, "arithmetic": "bfloat16"}
    extra |= {"percent_of_peak": 80.0, "peak_gb_per_s": 20.0, **beside("numpy.matmul", 0.01, 0.05)}
    return entry("cpu_matmul", "Rung 8", f"unit[{cores}]", 0.01, **extra)


def goal(name: str, of: str, below: float, **extra: Any) -> dict[str, Any]:
    return entry("launch", "Starting ranks", name, 30e-6, goal={"of": of, "below": below}, **extra)


def all_measured() -> dict[str, results.Results]:
    """A machine with a GPU that measured everything there is, and one that measured other things."""
    two = measured.strategies()[1]
    two |= {"fullname": "two", "name": "test_two", "group": "Strategies: another GPT"}
    two["extra_info"] |= {"label": "ZeRO-2", "strategy": "ZeRO-2", "layout": "dp=2,zero=2", "hidden": 0.25}
    two["extra_info"]["memory"] = {**two["extra_info"]["memory"], "gradients": 18 * 10**6}
    first = measured.everything()
    first["benchmarks"] += [
        *CUDA, unit("one", 2600.0, series="8 unit", size=1024), unit("all", 5000.0), two,
        entry("cpu_matmul", "Threads", "t", 0.01, label="s7_threads, 512, float32", gflops=170.0,
              peer_gflops=180.0, percent_of_peak=68.0, **beside("numpy.matmul", 0.01, 1.06, 0.1)),
        goal("missed", "beyond_peer", 15e-6, beyond_peer=22e-6, **beside("plain torch", 3e-5, 3.0)),
        entry("recompute", "Recomputation", "r", 0.04, **beside("without", 0.03, 1.33, 0.1)),
        entry("parameter_server", "Servers", "a", 0.04, note="rows of two", rows_per_s=12_345.0,
              program="minidist's server", **beside("its own form", 0.03, 1.33, 0.5)),
        entry("parameter_server", "Servers", "b", 0.05, measured.QUICK, **beside("a queue", 0.03, 0.5, 0.1)),
    ]  # fmt: skip
    gpu = {"name": "NVIDIA Made Up", "driver": "580.1", "memory_bytes": 2**36, "compute_capability": "9.0"}
    first["machine_info"]["gpus"] = [gpu, gpu]
    first["runs"][measured.FULL]["software"] = {**measured.SOFTWARE, "blas": BLAS, "numba-cuda": "0.30"}
    undecided = measured.ladder()
    undecided[-1]["extra_info"] |= beside("numpy.matmul", 0.01, 0.99)
    several = [entry("x", "Many rows", f"row_{n}", 0.2**n, bus_gb_per_s=n / 8) for n in range(13)]
    once = entry("x", "Once", "once", 3.0, measured.QUICK, peer_memory=5)
    once["stats"]["rounds"] = 1
    crowded = measured.scaling()
    second = measured.machine(*undecided, *several, once, *crowded[:3], cpu="Another", cores=1)
    return {"made up": results.rounded(first), "other": second}


MACHINES = all_measured()


def drawn(plot: Plot, name: str) -> str:
    """What a plot was given, instead of how matplotlib writes it, which versions change."""
    (axes,) = plot.drawn.axes
    size, below = plot.drawn.get_size_inches().round(2).tolist(), axes.get_axisbelow()
    lines = [f"{size} {axes.get_xlabel()!r} {axes.get_ylabel()!r}, grid below: {below}"]
    for which, ends, ticks in (
        (axes.xaxis, axes.get_xlim(), axes.get_xticks()),
        (axes.yaxis, axes.get_ylim(), axes.get_yticks()),
    ):
        formatter = which.get_major_formatter()
        shown = [formatter(tick, at) for at, tick in enumerate(ticks) if ends[0] <= tick <= ends[1]]
        lines.append(f"{axes.name} {which.get_scale()} {ends[0]:.3g} to {ends[1]:.3g}: {', '.join(shown)}")
    for each in axes.lines:
        points = " ".join(f"{x:.3g},{y:.3g}" for x, y in each.get_xydata())
        style = f"{each.get_linestyle()}{each.get_linewidth():g}{each.get_marker()}{each.get_markersize():g}"
        lines.append(f"line {each.get_color()} {style}: {points}")
    lines += [f"patch {each.get_facecolor()} {each.get_extents().width:.0f}" for each in axes.patches]
    for each in axes.texts:
        x, y = each.xy if hasattr(each, "xy") else each.get_position()
        lines.append(f"text {each.get_text()!r} {each.get_color()} {each.get_fontsize():g} {x:.3g},{y:.3g}")
    return f"<svg>{html.escape(plot.alt)}\n{html.escape('; '.join(lines))}\n"


SHORT = (
    (r"\n(?=<code>|<figcaption|<h5|<div class=.track|<thead|<div class=.bars|<div class=.scroll)", " "),
    (r"<style>.*?</style>|<script>.*?</script>|</?button[^>]*>|</?span>|</?code>|</?b>|</(?:li|t[dhr])>", ""),
    (r' (?:scope|title|role|tabindex|aria-label|data-text)="[^"]*"(?=[^<]*>)', ""),
    (r'<a class="note" href="#note-(\d+)">\1</a>', r"^\1"),
    (r'<i class="([^"]*)" style="left:([^%]*)%;width:([^%]*)%;', r"[\2+\3 \1 "),
    (r'--own:var\(--([^)]*)\)">(.*?)</i>', r"\1 \2]"),
    (r'<b class="(line\d+)" style="left:([^%]*)%"></b>', r"{\1 \2}"),
    (r"\n(?=<th)|<tr(?=[ >])", ""),
    (r"<t[hd](?=[ >])", "|"),
    (r' (?:class="right"|data-note="note-\d+")(?=[^<]*>)', ""),
    (r' (?:data-value|data-key|id|class)="([^"]*)"(?=[^<]*>)', r" \1"),
    (r"<(/\w+|div|p|dd|thead|tbody)>", ""),
    (r"[<>]", " "),
)  # fmt: skip
"""What the page is without the parts that repeat themselves, to be read."""


def read(text: str) -> str:
    """A page's lines, without most markup."""
    text = text[text.index("<body>") :]
    for pattern, short in SHORT:
        text = re.sub(pattern, short, text, flags=re.DOTALL)
    lines = (re.sub(r"\s+", " ", line).strip() for line in html.unescape(text).splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def in_terminal(width: int) -> str:
    stream = io.StringIO()
    printed.show(Console(file=stream, width=width, color_system=None), dict(reversed(MACHINES.items())))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


FORMS = {
    "page": lambda: read(page.page(MACHINES)),
    "terminal": lambda: in_terminal(100),
    "readme": lambda: printed.markdown(MACHINES),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_figure_is_as_expected(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plot, "svg", drawn)
    file, found = EXPECTED / f"{form}.txt", FORMS[form]()
    if os.environ.get("MINIDIST_EXPECTED"):
        file.write_text(found, encoding="utf-8")
    assert found.splitlines() == file.read_text(encoding="utf-8").splitlines()


def test_json_has_every_figure() -> None:
    whole = printed.as_json(MACHINES)
    assert whole["card"]["Fastest layout here"] == (
        "data parallel, overlap on 2 ranks; 100 ms a step; 1.10 of one process's time"
    )
    sentences = re.findall(r"^\d+\. (.*)$", printed.markdown(MACHINES), re.MULTILINE)
    assert [each["text"] for each in whole["findings"]] == sentences
    assert whole["findings"][-1]["rests_on"][0] == {
        "name": "bench_recompute.py::test_r",
        "run": measured.FULL,
    }
    for slug, found in MACHINES.items():
        made = whole["machines"][slug]
        rows = [row for section in made["sections"] for row in section["rows"]]
        assert (made["machine"], made["runs"]) == (found["machine_info"], found["runs"])
        assert len(rows) == len(found["benchmarks"])
        entries = [each for section in tables.sections(found) for each in section.entries]
        for row, each in zip(rows, entries, strict=True):
            assert row["label"] == columns.label(each)
            more = {key: value for key, value in each["extra_info"].items() if key != "label"}
            assert row.items() >= {**each["stats"], **more, "run": each["run"], "mode": each["mode"]}.items()
            assert row.get("verdict") == columns.verdict(each)
            assert row.get("undecided", False) == columns.undecided(each)
    assert (whole["machines"]["made up"]["goals"]) == {"met": 1, "of": 2}
