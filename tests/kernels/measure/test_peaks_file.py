"""Peaks are kept for each machine, and no state of the file is an error."""

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

from minidist.kernels.cache_folder import cache_folder
from minidist.kernels.cpu.support.caches import available_cpus
from minidist.kernels.cpu.support.vector_unit import vector_unit
from minidist.kernels.measure import peaks_file
from minidist.kernels.measure.peaks import Peaks
from tests.helpers.peaks import ONE


@pytest.fixture
def here():
    """Peaks such as this machine's."""
    unit, cores = vector_unit().name, len(available_cpus())
    return Peaks(peaks_file.cpu_name(), unit, cores, "2026-01-31", ONE, ONE)


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("MINIDIST_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")


def test_the_folder_is_where_the_system_keeps_caches(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / ".cache" / "minidist"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "minidist"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/minidist")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "minidist"
    monkeypatch.setenv("MINIDIST_CACHE_DIR", "/named")
    assert cache_folder() == Path("/named")


def test_without_a_home_the_folder_is_a_temporary_one(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder() == Path(tempfile.gettempdir()) / "minidist"


def test_the_name_holds_what_the_peaks_depend_on(monkeypatch):
    monkeypatch.setattr(peaks_file, "cpu_name", lambda: "Intel(R) Xeon(R) @ 2.00GHz")
    monkeypatch.setattr(peaks_file, "available_cpus", lambda: [0, 1, 2])
    monkeypatch.setattr(peaks_file, "gpu_names", lambda: ["NVIDIA H200"])
    unit = vector_unit().name.lower()
    assert peaks_file.path().name == f"roofline-intel-r-xeon-r-2-00ghz-3-cores-{unit}-nvidia-h200.json"
    names = {peaks_file.path().name}
    monkeypatch.setattr(peaks_file, "gpu_names", lambda: [])
    names.add(peaks_file.path().name)
    monkeypatch.setattr(peaks_file, "available_cpus", lambda: [0, 1])
    names.add(peaks_file.path().name)
    monkeypatch.setattr(peaks_file, "vector_unit", lambda: dataclasses.replace(vector_unit(), name="x"))
    names.add(peaks_file.path().name)
    assert len(names) == 4


def test_what_was_saved_is_loaded(here, tmp_path):
    file = tmp_path / "new" / "folder" / "x.json"
    assert peaks_file.load(file) is None
    assert peaks_file.save(here, file)
    assert peaks_file.load(file) == here
    assert os.listdir(file.parent) == ["x.json"]


@pytest.mark.parametrize("other", [{"machine": "another CPU"}, {"cores": 999}, {"vector_unit": "another"}])
def test_the_file_of_another_machine_is_not_used(here, tmp_path, other):
    file = tmp_path / "x.json"
    assert peaks_file.save(dataclasses.replace(here, **other), file)
    assert peaks_file.load(file) is None


def spoilt(text):
    """The ways in which a file may be unusable."""
    kept = json.loads(text)
    peaks = kept["peaks"]
    yield from ("", text[: len(text) // 2], "null", "[]", "7", b"\xff\xfe\x00")
    yield json.dumps({**kept, "format": kept["format"] + 1})
    yield json.dumps({"format": kept["format"]})
    for other in (3, [], {key: peaks[key] for key in peaks if key != "all"}):
        yield json.dumps({**kept, "peaks": other})
    for change in (
        {"unknown": 1},
        {"one": None},
        {"one": 5},
        {"all": {**peaks["all"], "granted": "all"}},
        {"one": {**peaks["one"], "bandwidth": "fast"}},
        {"one": {**peaks["one"], "bandwidth": -1.0}},
        {"one": {**peaks["one"], "flops": 1.0}},
        {"one": {**peaks["one"], "flops": {"float32": float("nan")}}},
    ):
        yield json.dumps({**kept, "peaks": {**peaks, **change}})


def test_a_spoilt_file_is_as_good_as_none(here, tmp_path):
    file = tmp_path / "x.json"
    assert peaks_file.save(here, file)
    for text in spoilt(file.read_text()):
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert peaks_file.load(file) is None, text
    assert peaks_file.save(here, file)
    assert peaks_file.load(file) == here
    assert peaks_file.load(tmp_path) is None  # a folder


def test_where_nothing_can_be_written_saving_says_so(here, tmp_path, monkeypatch):
    (tmp_path / "a file").write_text("")
    assert not peaks_file.save(here, tmp_path / "a file" / "x.json")
    # A read-only folder; as chmod does not bind root, the system's answer is given by hand.
    monkeypatch.setattr(Path, "write_bytes", lambda *_, **__: (_ for _ in ()).throw(PermissionError("no")))
    assert not peaks_file.save(here, tmp_path / "x.json")
    assert os.listdir(tmp_path) == ["a file"]


def test_a_file_is_replaced_whole_or_not_at_all(here, tmp_path, monkeypatch):
    file = tmp_path / "x.json"
    peaks_file.save(here, file)

    def full(path, content):
        with open(path, "wb") as stream:
            stream.write(content[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert not peaks_file.save(dataclasses.replace(here, date="2027-01-01"), file)
    assert peaks_file.load(file) == here
    assert os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nmodel name\t: AMD   EPYC 9654\n\nprocessor : 1\nmodel name : B\n", "AMD EPYC 9654"),
        ("processor : 0\nCPU implementer : 0x41\nCPU part : 0xd40\n\n", "aarch64 0x41 0xd40"),
        ("", "aarch64"),
        (None, "aarch64"),
    ],
)
def test_a_cpu_has_a_name(tmp_path, monkeypatch, text, expected):
    monkeypatch.setattr(peaks_file.platform, "machine", lambda: "aarch64")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert peaks_file.cpu_name(str(tmp_path / "cpuinfo")) == expected


def test_gpus_are_named_once_each(tmp_path):
    for i, model in enumerate(["NVIDIA H200", "NVIDIA A100", "NVIDIA H200"]):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "information").write_text(f"Model: \t\t {model}  \nIRQ: 5\n")
    assert peaks_file.gpu_names(str(tmp_path)) == ["NVIDIA A100", "NVIDIA H200"]
    assert peaks_file.gpu_names(str(tmp_path / "none")) == []
