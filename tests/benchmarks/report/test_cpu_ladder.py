"""The CPU ladder on the card: each rung at its best; and a file of another machine says whose it is."""

import copy

import pytest

from minidist.benchmarks import bench_cpu_matmul
from minidist.benchmarks.harness import results
from minidist.benchmarks.report import ladders
from tests.benchmarks.harness.test_turns import FakeBenchmark
from tests.helpers import measured


def product(rung, size, rate, group="Products", suite="cpu_matmul", **extra):
    label = f"{rung}, {size}"
    beside = measured.beside("numpy.matmul", 0.1, 100 / rate, 0.001)
    return measured.entry(
        suite, group, f"{rung}-{size}", 0.1, label=label, gflops=rate, percent_of_peer=rate,
        peer_gflops=100.0, percent_of_peak=rate / 2, peak_gb_per_s=50.0, **beside, **extra,
    )  # fmt: skip


def of_machine(cpu_id, kernel, rate):
    """A machine's results: its first rung and its last."""
    found = copy.deepcopy(
        measured.machine(
            product("s1_python_loops", 64, 0.01), product("s7_threads", 64, rate), cpu="AMD EPYC"
        )
    )
    found["machine_info"]["cpu_id"] = cpu_id
    blas = {"name": "openblas", "version": "0.3", "architecture": kernel}
    for run in found["runs"].values():
        run["software"] = {**run["software"], "blas": blas}
    return found


ZEN4, ZEN5 = of_machine("25-17-1", "SkylakeX", 77.0), of_machine("26-2-1", "Cooperlake", 33.0)


def test_each_rung_counts_at_its_fastest_size_in_single_precision():
    entries = [
        product("s6_register_tile", 64, 50.0, suite="headline"),
        product("s6_register_tile", 512, 90.0),
        product("s6_register_tile", 1024, 80.0),
        product("s6_register_tile", 2048, 999.0, group="Matrix products on one CPU core, float64"),
        product("s7_threads", "1024, float64", 998.0),
        product("s7_threads", "1024, float32", 150.0),
        product("s7_threads", "64 x 4096 x 64", 997.0),
        product("s7_backward", 1024, 996.0, suite="attention"),  # a rung of another ladder
        product("s1_python_loops", 64, 0.01),
    ]
    found = ladders.climbed(entries)
    assert [(rung.name, rung.size, rung.gflops) for rung in found] == [
        ("1 python loops", 64, 0.01),
        ("6 register tile", 512, 90.0),
        ("7 threads", 1024, 150.0),
    ]
    assert ladders.cpu_bars(entries[-1:], cores=2) is None


@pytest.mark.parametrize("measured_here", [False, True])
def test_a_clone_with_a_foreign_file_says_whose_it_is(run, monkeypatch, tmp_path, measured_here):
    """As on a machine whose CPU has the same name as that of the results in the repository."""
    monkeypatch.setattr(results.machine, "describe", lambda: ZEN5["machine_info"])
    results.save(ZEN4, tmp_path / "amd-epyc-2-cores.json")
    if measured_here:
        results.save(ZEN5, results.own_file(tmp_path, ZEN5["machine_info"]))
    code, said, err = run("report", "--results", str(tmp_path), "--out", str(tmp_path / "report.html"))
    assert (code, err) == (0, "")
    html = (tmp_path / "report.html").read_text()
    assert ("This machine has no results yet" in said) != measured_here
    assert "another machine: AMD EPYC (25-17-1)" in html
    assert ("another machine: AMD EPYC (25-17-1)" in said) != measured_here
    for text in (said, html):
        assert ("33.0%" in text) == measured_here
    if measured_here:  # the other's figures are folded away
        assert "Cooperlake kernel" in html
        assert html.index("33.0%") < html.index("<details><summary>another machine:") < html.rindex("77.0%")


@pytest.mark.parametrize("cores", ["one", "all"])
def test_what_the_matrix_units_benchmark_enters_is_on_the_card(monkeypatch, cores):
    benchmark = FakeBenchmark()
    monkeypatch.setattr(bench_cpu_matmul, "_rates", lambda *_: benchmark.extra_info.update(gflops=1.0))
    monkeypatch.setattr(bench_cpu_matmul, "PAUSE", 0.0)
    monkeypatch.setattr(bench_cpu_matmul, "turns", lambda *_, **given: None)
    bench_cpu_matmul.test_matrix_unit(benchmark, False, monkeypatch, 64, "bf16", "numpy", cores)
    rung = ladders.rung_of(
        {"suite": "bench_cpu_matmul", "group": "", "name": "", "extra_info": benchmark.extra_info}
    )
    assert (rung.number, rung.size, rung.all_cores) == (ladders.MATRIX_UNIT, 64, cores == "all")
