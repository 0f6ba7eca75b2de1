"""The results file: what a new run replaces and what it keeps, and files that are none."""

import json
import os

import pytest

from minidist.benchmarks.harness import results

MACHINE = {"cpu": "Some CPU", "cores": 2, "memory_bytes": 2**34, "caches": {}, "gpus": None}


def run(when, mode, medians, suite="bench_x"):
    """The results of one run: benchmarks by name with their medians."""
    entries = [
        {
            "suite": suite,
            "group": suite,
            "name": name,
            "fullname": f"{suite}.py::{name}",
            "run": when,
            "stats": {"median": median, "iqr": 0.0, "rounds": 5},
            "extra_info": {},
        }
        for name, median in medians.items()
    ]
    return {
        "schema": results.SCHEMA,
        "machine_info": MACHINE,
        "runs": {when: {"mode": mode, "software": {}, "commit": None}},
        "suites": {suite: "About it."},
        "benchmarks": entries,
    }


def all_of(found):
    return {(e["name"], found["runs"][e["run"]]["mode"]): e["stats"]["median"] for e in found["benchmarks"]}


def test_a_quick_run_keeps_the_full_figures():
    full = run("2025-01-01", "full", {"a": 1.0, "b": 2.0})
    merged = results.merge(full, run("2025-01-02", "quick", {"a": 1.5}), everything=["bench_x.py::a"])
    assert all_of(merged) == {("a", "full"): 1.0, ("b", "full"): 2.0, ("a", "quick"): 1.5}
    assert [(e["name"], e["mode"], e["stats"]["median"]) for e in results.newest(merged)] == [
        ("a", "quick", 1.5),
        ("b", "full", 2.0),
    ]


def test_a_run_replaces_its_own_mode():
    first = run("2025-01-01", "quick", {"a": 1.0, "b": 2.0})
    merged = results.merge(first, run("2025-01-02", "quick", {"a": 1.5}))
    assert all_of(merged) == {("a", "quick"): 1.5, ("b", "quick"): 2.0}
    again = results.merge(merged, run("2025-01-03", "quick", {"b": 2.5}))
    assert list(again["runs"]) == ["2025-01-02", "2025-01-03"]  # nothing refers to the first any more


def test_a_benchmark_that_is_gone_goes_when_all_are_run():
    old = run("2025-01-01", "quick", {"a": 1.0, "gone": 2.0, "failed": 3.0})
    names = ["bench_x.py::a", "bench_x.py::failed"]
    merged = results.merge(old, run("2025-01-02", "quick", {"a": 1.5}), everything=names)
    assert all_of(merged) == {("a", "quick"): 1.5, ("failed", "quick"): 3.0}


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "machine.json"
    results.save(run("2025-01-01", "quick", {"a": 1.0}), path)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        results.save(run("2025-01-02", "quick", {"a": 2.0}), path)
    assert all_of(results.load(path)) == {("a", "quick"): 1.0}
    assert [file.name for file in tmp_path.iterdir()] == ["machine.json"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_is_no_result(tmp_path, value):
    with pytest.raises(ValueError, match="JSON cannot hold"):
        results.save(run("2025-01-01", "quick", {"a": value}), tmp_path / "machine.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 99}', '{"schema": 1}'])
def test_a_file_that_holds_no_results_is_named(tmp_path, text):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"machine\.json .*name another file, or move it away"):
        results.load(path)


DAMAGED = {
    "its benchmarks": ("benchmarks", None),
    "its machine_info": ("machine_info", None),
    "its machine_info's cpu": ("machine_info", {}),
    "its benchmark 0's name": ("benchmarks", [1, 2]),
    "its benchmark 0's run": ("runs", {}),
    "the mode of its run 2025-01-01": ("runs", {"2025-01-01": {}}),
    "its benchmark 0's figures": ("stats", None),
    "its benchmark 0's median": ("stats", {}),
    "its benchmark 0's peer": ("extra_info", {"ratio": 0.5}),
    "its benchmark 0's yardstick": ("extra_info", {"over_yardstick": 0.5}),
}


@pytest.mark.parametrize("told", DAMAGED)
def test_a_damaged_file_is_named_with_what_it_lacks(tmp_path, told):
    key, value = DAMAGED[told]
    found = run("2025-01-01", "quick", {"a": 1.0})
    (found if key in found else found["benchmarks"][0])[key] = value
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=rf"machine\.json lacks {told}: name another file"):
        results.load(path)


def test_a_folder_of_results_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        results.in_order(tmp_path / "none")
    with pytest.raises(ValueError, match=r"no results in .*: run `minidist bench` first"):
        results.in_order(tmp_path)
    (tmp_path / "file.json").write_text("{}")
    with pytest.raises(ValueError, match="is a file: name the folder"):
        results.in_order(tmp_path / "file.json")


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"missing\.json can't be read"):
        results.load(tmp_path / "missing.json")


def test_this_machine_leads(tmp_path, monkeypatch):
    for slug in ("a", "b", "c"):
        (tmp_path / f"{slug}.json").write_text(json.dumps(run("2025-01-01", "quick", {"x": 1.0})))
    monkeypatch.setattr(results.machine, "describe", lambda: MACHINE)
    monkeypatch.setattr(results.machine, "slug", lambda _, whole=False: "b")
    assert results.in_order(tmp_path)[0] == "b"
    assert list(results.in_order(tmp_path)[1]) == ["b", "a", "c"]
    assert list(results.in_order(tmp_path, "c")[1]) == ["c", "a", "b"]
    with pytest.raises(ValueError, match="unknown machine 'd'"):
        results.in_order(tmp_path, "d")
    monkeypatch.setattr(results.machine, "slug", lambda _, whole=False: "new")
    assert results.in_order(tmp_path)[0] is None


def test_a_gpus_machine_is_named_by_it_and_another_one_with_it_by_its_cpu_too(tmp_path, monkeypatch):
    gpus = [{"name": "NVIDIA H200"}]
    one, other = ({**MACHINE, "cpu": cpu, "gpus": gpus} for cpu in ("Some CPU", "Other CPU"))
    assert results.own_file(tmp_path, one).name == "nvidia-h200.json"
    results.save(
        {**run("2025-01-01", "quick", {"a": 1.0}), "machine_info": one}, tmp_path / "nvidia-h200.json"
    )
    assert results.own_file(tmp_path, one).name == "nvidia-h200.json"
    assert results.own_file(tmp_path, other).name == "nvidia-h200-other-2-cores.json"
    assert results.own_file(tmp_path, MACHINE).name == "some-2-cores.json"
    monkeypatch.setattr(results.machine, "describe", lambda: other)
    assert results.in_order(tmp_path)[0] is None
    monkeypatch.setattr(results.machine, "describe", lambda: one)
    assert results.in_order(tmp_path)[0] == "nvidia-h200"
    (tmp_path / "nvidia-h200.json").write_text("spoilt")
    with pytest.raises(ValueError, match=r"nvidia-h200\.json is not JSON"):
        results.own_file(tmp_path, one)


def test_two_machines_of_one_name_have_files_of_their_own(tmp_path, monkeypatch):
    zen4, zen5 = ({**MACHINE, "cpu_id": cpu_id} for cpu_id in ("25-17-1", "26-2-1"))
    results.save(
        {**run("2025-01-01", "full", {"a": 1.0}), "machine_info": zen4}, tmp_path / "some-2-cores.json"
    )
    own = results.own_file(tmp_path, zen5)
    assert own.name == f"some-2-cores-{results.machine.digest(zen5)}.json"
    with pytest.raises(
        ValueError, match=r"holds results of Some CPU \(25-17-1\).* this is Some CPU \(26-2-1\)"
    ):
        results.check_writable(tmp_path / "some-2-cores.json", zen5)
    results.save({**run("2025-01-02", "quick", {"a": 2.0}), "machine_info": zen5}, own)
    assert results.own_file(tmp_path, zen5) == own
    assert results.own_file(tmp_path, zen4).name == "some-2-cores.json"
    monkeypatch.setattr(results.machine, "describe", lambda: zen5)
    first, found = results.in_order(tmp_path)
    titles = [results.machine.title(each["machine_info"]) for each in found.values()]
    assert first == own.stem
    assert [title.partition(",")[0] for title in titles] == [
        "Some CPU (26-2-1)",
        "another machine: Some CPU (25-17-1)",
    ]


def test_results_without_an_identity_are_another_machines(tmp_path):
    results.save(run("2025-01-01", "full", {"a": 1.0}), tmp_path / "some-2-cores.json")
    assert results.own_file(tmp_path, {**MACHINE, "cpu_id": "25-17-1"}).name != "some-2-cores.json"
