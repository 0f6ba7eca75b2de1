"""The CPU ladder on two machines: each share in its own machine's row, and a foreign file says so."""

import copy
import re

import pytest

from minidist.benchmarks import bench_cpu_matmul
from minidist.benchmarks.harness import identity, results
from minidist.benchmarks.report import ladders, page, rooflines
from minidist.cli import commands
from tests.helpers import measured


def of_machine(cpu_id, kernel, shares):
    """A machine's results, with these shares of NumPy's speed by the names of the benchmarks."""
    entries = []
    for name, percent in shares.items():
        entry = measured.entry(
            "cpu_matmul", "Products", name, 0.1, **measured.beside("numpy.matmul", 0.1, 100 / percent, 0.001)
        )
        entry |= {"name": name, "fullname": f"bench_cpu_matmul.py::{name}"}
        entry["extra_info"]["percent_of_peer"] = percent
        entries.append(entry)
    found = copy.deepcopy(measured.machine(*entries, cpu="AMD EPYC"))
    if cpu_id:
        found["machine_info"]["cpu_id"] = cpu_id
    blas = {"name": "openblas", "version": "0.3", "architecture": kernel}
    for run in found["runs"].values():
        run["software"] = {**run["software"], "blas": blas}
    return found


ZEN4 = of_machine(
    "25-17-1", "SkylakeX", {"test_rung[s6_register_tile-64]": 77.0, "test_all_cores[float32-2048]": 104.0}
)
ZEN5 = of_machine("26-2-1", "Cooperlake", {"test_rung[s6_register_tile-64]": 33.0})
WITH_UNIT = of_machine("26-2-1", "Cooperlake", {ladders.UNIT.format(1024): 190.0})
UNKNOWN = of_machine("", "Haswell", {"test_tall_and_flat[64x4096x64-s7_threads]": 54.0})


def test_each_share_is_in_its_own_machines_row():
    rows = ladders.cpu_rows({"zen4": ZEN4, "zen5": ZEN5, "old": UNKNOWN})
    found = [
        (row.slug, row.rung[:6], {p: c for p, c in zip(ladders.PRODUCTS, row.cells(), strict=True) if c})
        for row in rows
    ]
    assert found == [
        ("zen4", "rung 6", {"64": "77.0%"}),
        ("zen4", "rung 7", {"2048": "104%"}),
        ("zen5", "rung 6", {"64": "33.0%"}),
        ("old", "rung 7", {"64 x 4096 x 64": "54.0%"}),
    ]
    assert "CPU family 26, model 2, stepping 1; full run of 2025-02-03" in rows[2].measured
    assert "NumPy on openblas's Cooperlake kernel" in rows[2].measured
    assert rows[3].measured.startswith("CPU family, model and stepping not recorded")


def test_rung_8_has_a_row_and_the_roofline_its_ceiling():
    (row,) = ladders.cpu_rows({"m": WITH_UNIT})
    assert (row.rung, [cell for cell in row.cells() if cell]) == ("rung 8 in bf16, 2 cores", ["190%"])
    assert row.measured.endswith("; the matrix unit of this CPU: 1.9 times NumPy's float32")
    entries = []
    for series, rate, peak, more in (
        ("6 register tile", 250.0, 270.0, {}),
        ("8 matrix unit, bf16", 480.0, 560.0, {"arithmetic": "bfloat16"}),
    ):
        entry = copy.deepcopy(WITH_UNIT["benchmarks"][0])
        entry["extra_info"] |= {"series": series, "size": 1024, "gflops": rate, "peak_gb_per_s": 30.0, **more}
        entry["extra_info"]["percent_of_peak"] = 100 * rate / peak
        entries.append(entry)
    plot = rooflines.cpu_roofline(entries, "a CPU")
    assert "8 matrix unit, bf16 480 of 560" in plot.alt
    assert "6 register tile 250 of 270" in plot.alt
    last = rooflines.cpu_lines(entries)[-1]
    assert last.points == [(pytest.approx(1024 / 6), 480.0)]  # float32 in memory


def test_a_share_that_the_spread_leaves_open_is_marked():
    found = copy.deepcopy(ZEN5)
    found["benchmarks"][0]["extra_info"] |= measured.beside("numpy.matmul", 0.1, 1.0, 0.2)
    (row,) = ladders.cpu_rows({"m": found})
    assert row.cells()[0] == "~33.0%"


def test_the_quick_run_measures_every_product_of_the_table():
    quick = {
        f"test_{name}[{case.id}]"
        for name, cases in {
            "rung": bench_cpu_matmul.cases(),
            "all_cores": bench_cpu_matmul.test_all_cores.pytestmark[1].args[1],
        }.items()
        for case in cases
        if not case.marks
    }
    sizes = bench_cpu_matmul.test_matrix_unit.pytestmark[1].args[1]
    assert {case.id for case in sizes if not case.marks} == {"1024"}
    quick.add(ladders.UNIT.format(1024))
    shapes = [shape for shape, wanted in bench_cpu_matmul.TALL_AND_FLAT.items() if wanted]
    quick |= {
        f"test_tall_and_flat[{'x'.join(map(str, shape))}-{step.name}]"
        for shape in shapes
        for step in bench_cpu_matmul.TABLE
    }
    assert {name for names in ladders.PRODUCTS.values() for name in names} <= quick


@pytest.mark.parametrize("measured_here", [False, True])
def test_a_clone_with_a_foreign_file_says_whose_it_is(capfd, monkeypatch, tmp_path, measured_here):
    """As on a machine whose CPU has the same name as that of the results in the repository."""
    monkeypatch.setattr(results.machine, "describe", lambda: ZEN5["machine_info"])
    results.save(ZEN4, tmp_path / "amd-epyc-2-cores.json")
    if measured_here:
        results.save(ZEN5, results.own_file(tmp_path, ZEN5["machine_info"]))
    with pytest.raises(SystemExit) as ended:
        commands.main(["report", "--results", str(tmp_path), "--out", str(tmp_path / "report.html")])
    said, err = capfd.readouterr()
    assert (ended.value.code, err) == (0, "")
    html = (tmp_path / "report.html").read_text()
    assert ("This machine has no results yet" in said) != measured_here
    for text in (said, html):
        assert "another machine: AMD EPYC (25-17-1)" in text
        assert ("33.0%" in text) == measured_here
    if measured_here:
        own, other = said.index("\nAMD EPYC (26-2-1)", said.index(ladders.CPU_TITLE)), said.rindex("77.0%")
        assert own < said.index("33.0%", own) < said.index("another machine:", own) < other


def test_the_page_links_each_share_to_its_own_note():
    html = page.page({"zen4": ZEN4, "zen5": ZEN5})
    section = html[html.index('<section id="machines">') :].partition("</section>")[0]
    notes = dict(re.findall(r'data-note="(note-\d+)">(\d[\d.]*%)', section))
    assert sorted(notes.values()) == ["104%", "33.0%", "77.0%"]
    for name, text in notes.items():
        note = html[html.index(f'id="{name}"') :].partition("</li>")[0]
        assert f"<code>{'zen5' if text == '33.0%' else 'zen4'}.json</code>" in note


def test_a_machine_without_the_ladder_has_no_row():
    assert ladders.cpu_rows({"m": measured.machine()}) == []
    assert "machines" not in re.findall(r'<section id="(\w+)">', page.page({"m": measured.machine()}))


def test_arms_numbers_have_names():
    told = identity.told({"cpu_id": "0x41-0xd4f-0x0-1"})
    assert told == "CPU implementer 0x41, part 0xd4f, variant 0x0, revision 1"
