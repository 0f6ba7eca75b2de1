"""pytest-benchmark's own commands from a clone's root, as docs/guide/benchmarks.md lists them.

One product of 64 by 64 is measured a few times; the commands' own files go to a folder of the test.
"""

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from minidist.benchmarks.harness import describe_machine as machine
from minidist.benchmarks.harness import results
from tests.helpers import warm_python
from tests.helpers.clocks import HANG

ROOT = Path(__file__).parents[2]
COMMITTED = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
ONE = "test_rung and s5_cache_blocks-64"
NAME = "bench_cpu_matmul.py::test_rung[s5_cache_blocks-64]"


def ran(*words, code=0, module="pytest"):
    command = [sys.executable, "-m", module, *map(str, words)]
    # pytest-benchmark times nothing inside an xdist worker, which these tests may run in.
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    done = warm_python.run(command, timeout=HANG, cwd=ROOT, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("benchmarks")


@pytest.fixture(scope="module")
def first(folder):
    """What a first run prints: it is saved, also as one JSON file, and drawn if pygal is here."""
    drawn = [f"--benchmark-histogram={folder}/drawn"] if importlib.util.find_spec("pygal") else []
    kept = [f"--benchmark-storage={folder}", "--benchmark-autosave", f"--benchmark-json={folder}/all.json"]
    return ran("benchmarks/bench_cpu_matmul.py", "--benchmark-only", "-k", ONE, *kept, *drawn)


def test_the_tools_table_is_followed_by_the_ratio_to_the_peer(first):
    assert "1 passed" in first
    for words in ("Saved benchmark data in: ", "Wrote benchmark data in: "):
        assert words in first
    row = re.search(r"^test_rung\[s5_cache_blocks-64\] +[\d.,]+ .*$", first, flags=re.MULTILINE)
    assert row
    table, ratios = first.index(row[0]), first.index("our time over the peer's")
    assert table < ratios
    assert re.search(r"s5_cache_blocks-64\] +[\d.]+ \([\d.]+–[\d.]+\).* numpy\.matmul ", first[ratios:])


def test_the_json_has_the_rounds_the_ratio_and_no_host(first, folder):
    found = json.loads((folder / "all.json").read_text())
    (entry,) = found["benchmarks"]
    assert entry["fullname"] == NAME
    assert entry["extra_info"]["peer"] == "numpy.matmul"
    assert len(entry["stats"]["data"]) == entry["stats"]["rounds"]
    assert found["machine_info"] == json.loads(json.dumps(machine.describe()))


@pytest.mark.skipif(importlib.util.find_spec("pygal") is None, reason="pygal, which draws it, is not here")
def test_a_histogram_is_drawn_for_each_group(first, folder):
    (drawn,) = folder.glob("drawn*.svg")
    assert "s5_cache_blocks-64" in drawn.read_text()


def test_a_later_run_is_compared_with_the_saved_one_and_without_only(first, folder):
    told = ran("benchmarks", "-k", ONE, f"--benchmark-storage={folder}", "--benchmark-compare")
    assert "Comparing against benchmarks from" in told
    assert len(re.findall(r"^test_rung\[s5_cache_blocks-64\] \((?:NOW|0001\S*)\)", told, re.MULTILINE)) == 2
    assert "machine_info is different" not in told


def test_a_results_file_of_the_repository_is_compared_with():
    """Names are a results file's, so the row is found; the file is another machine's, which is no error."""
    told = ran("benchmarks/bench_cpu_matmul.py", "-k", ONE, f"--benchmark-compare={COMMITTED[0]}")
    assert len(re.findall(r"^test_rung\[s5_cache_blocks-64\] \(", told, re.MULTILINE)) == 2


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_pytest_benchmark_compare_reads_results_files(path):
    told = ran("compare", path, "--sort=name", module="pytest_benchmark")
    for key in ("name", "group"):
        assert {e[key] for e in results.load(path)["benchmarks"] if e[key] not in told} == set()


def test_an_old_results_file_is_filled_in_as_it_is_written(tmp_path):
    old = json.loads(COMMITTED[0].read_text())
    for entry in old["benchmarks"]:
        for key in ("ops", "outliers", "ld15iqr", "hd15iqr"):
            del entry["stats"][key]
    results.save(old, tmp_path / "old.json")
    assert "?;?" in ran("compare", tmp_path / "old.json", module="pytest_benchmark")
    for entry in results.load(tmp_path / "old.json")["benchmarks"]:
        stats = entry["stats"]
        assert stats["min"] <= stats["ld15iqr"] <= stats["hd15iqr"] <= stats["max"]


def test_timings_can_still_be_switched_off():
    told = ran("benchmarks/bench_cpu_matmul.py", "--benchmark-disable", "-k", ONE)
    assert "1 passed" in told
    assert "Median" not in told


def test_a_project_of_its_own_benchmarks_a_strategy(tmp_path):
    example = ROOT / "examples" / "bench_own_strategy.py"
    assert len(example.read_text().splitlines()) <= 45
    shutil.copy(example, tmp_path)
    told = ran(
        "-p", "minidist.benchmarks.conftest", "--rootdir", tmp_path, "-c", os.devnull,
        "-p", "no:cacheprovider", tmp_path / example.name, "--benchmark-only",
    )  # fmt: skip
    assert re.search(r"test_one_message +[\d.]+ \([\d.–]+\).* minidist's dp=2", told)
