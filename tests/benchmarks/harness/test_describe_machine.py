"""Describe a machine: names for files, and what tells it from others, but nothing that says whose it is."""

import json
import platform
import sys
from types import SimpleNamespace

import pytest

from minidist.benchmarks.harness import describe_machine as machine
from minidist.comm.launching import cores


def described(**changes):
    return {
        "cpu": "AMD EPYC 9654 96-Core Processor",
        "cores": 8,
        "memory_bytes": 2**34,
        "gpus": None,
    } | changes


@pytest.mark.parametrize(
    ("changes", "slug"),
    [
        ({}, "amd-epyc-9654-8-cores"),
        ({"cores": 1}, "amd-epyc-9654-1-core"),
        ({"cpu": "Intel(R) Xeon(R) Gold 6248 CPU @ 2.50GHz"}, "intel-xeon-gold-6248-8-cores"),
        ({"cpu": "AMD Ryzen 7 5800H with Radeon Graphics"}, "amd-ryzen-7-5800h-8-cores"),
        ({"cpu": "Apple M2 Pro"}, "apple-m2-pro-8-cores"),
        ({"gpus": [{"name": "NVIDIA H200"}]}, "nvidia-h200"),
        ({"gpus": [{"name": "NVIDIA H200"}] * 8}, "8x-nvidia-h200"),
    ],
)
def test_slug(changes, slug):
    assert machine.slug(described(**changes)) == slug


def test_a_title_tells_cpus_of_one_name_apart():
    told = machine.title(described(cpu="AMD EPYC", cpu_id="26-2-1", another=True))
    assert told == "another machine: AMD EPYC (26-2-1), 8 cores, 16 GiB, no GPU"


def test_a_kernel_that_the_environment_chose_is_named(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert machine.blas()["chosen_by"] == "OPENBLAS_CORETYPE"
    monkeypatch.delenv("OPENBLAS_CORETYPE")
    assert "chosen_by" not in machine.blas()


def test_this_machine_is_described_without_its_name():
    text = json.dumps([machine.describe(), machine.software()])
    found = json.loads(text)[0]
    assert found["cores"] >= 1
    assert found["cpu"]
    assert "/" not in json.dumps(machine.software()["blas"])  # no paths
    if len(platform.node()) > 3:
        assert platform.node() not in text


def limits(root, own, files):
    """CPU and memory that these files of control groups allow a process in the groups `own`."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "own").write_text(own)
    return [read(str(root), str(root / "own")) for read in (cores.cpu_quota, cores.memory_limit)]


V1 = "5:cpu,cpuacct:/docker/0815\n4:memory:/docker/0815\n1:name=systemd:/docker/0815\n0::/\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n", "memory.max": "629145600\n"}, [1.5, 600 << 20]),
        ("0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max\n"}, [None, None]),
        ("0::/\n", {"cpu.max": "nonsense", "memory.max": ""}, [None, None]),
        # The limit of a group above binds too, and another group's does not.
        ("0::/a/b\n", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, [0.5, None]),
        ("0::/a/b\n", {"a/memory.max": "9", "a/b/memory.max": "7", "a/c/memory.max": "5"}, [None, 7]),
        # Version 1, whose paths are those outside the container, and so missing inside.
        (
            V1,
            {
                "cpu/cpu.cfs_quota_us": "150000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
                "memory/memory.limit_in_bytes": "629145600\n",
            },
            [1.5, 600 << 20],
        ),
        (
            V1,
            {
                "cpu/docker/0815/cpu.cfs_quota_us": "-1\n",
                "cpu/docker/0815/cpu.cfs_period_us": "100000\n",
                "memory/docker/0815/memory.limit_in_bytes": "7",
                "docker/0815/memory.max": "5",
            },
            [None, 7],
        ),
        ("", {}, [None, None]),
    ],
)
def test_limits_of_a_container(tmp_path, own, files, expected):
    assert limits(tmp_path, own, files) == expected


def test_the_memory_is_no_more_than_the_limit(monkeypatch):
    monkeypatch.setattr(machine.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**20}.get)
    for limit, expected in ((600 << 20, 600 << 20), (None, 2**32), (2**63 - 4096, 2**32)):
        monkeypatch.setattr(machine, "memory_limit", lambda limit=limit: limit)
        assert machine.memory_bytes() == expected


def test_caches(tmp_path):
    for index, (level, kind, size) in enumerate(
        [("1", "Data", "48K"), ("2", "Unified", "2048K"), ("3", "Unified", "odd")]
    ):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(text + "\n")
    assert machine.caches(str(tmp_path)) == {"L1d": "48 KiB", "L2": "2 MiB"}
    assert machine.caches(str(tmp_path / "missing")) == {}


def test_gpus_as_nvidia_smi_tells(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    text = "NVIDIA H200, 580.65.06, 143771, 9.0\nNVIDIA GH200, 580.65.06, [N/A], 9.0\n"
    monkeypatch.setattr(machine, "output", lambda *_: text)
    first, second = machine.gpus()
    assert first == {
        "name": "NVIDIA H200",
        "driver": "580.65.06",
        "memory_bytes": 143771 * 2**20,
        "compute_capability": "9.0",
    }
    assert second["memory_bytes"] is None
    for broken in ("", None, "No devices were found\n"):
        monkeypatch.setattr(machine, "output", lambda *_, broken=broken: broken)
        assert machine.gpus() is None


def test_without_nvidia_smi_the_driver_is_asked(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.setattr(
        machine, "output", lambda command, timeout: asked.append(command) or "A GPU, CUDA 13.0, 1024, 9.0\n"
    )
    monkeypatch.setattr(machine, "GPU_DEVICES", (str(tmp_path / "missing"),))
    assert machine.gpus() is None
    assert not asked
    monkeypatch.setattr(machine, "GPU_DEVICES", (str(tmp_path),))
    (found,) = machine.gpus()
    assert (found["name"], found["driver"], found["memory_bytes"]) == ("A GPU", "CUDA 13.0", 2**30)
    assert asked[0][0] == sys.executable


def test_what_the_driver_is_asked_is_what_is_read(monkeypatch, capsys):
    from minidist.kernels.cuda.runtime import gpu_driver

    known = gpu_driver.Properties("A GPU", (9, 0), 132, 50 << 20, 2**30, 227 * 1024, "13.0", True)
    monkeypatch.setattr(gpu_driver, "get", lambda: SimpleNamespace(count=2, properties=lambda number: known))
    exec(machine.ASK_DRIVER, {})
    assert capsys.readouterr().out == "A GPU, CUDA 13.0, 1024, 9.0\n" * 2


def test_a_command_that_is_missing_fails_or_hangs_says_nothing():
    assert machine.output(["a-command-that-nobody-has"]) is None
    assert machine.output(["false"]) is None
    assert machine.output(["sleep", "20"], timeout=0.1) is None
    assert machine.output(["echo", "yes"]) == "yes\n"


ZEN4 = {
    "cpu": "AMD EPYC",
    "cpu_id": "25-17-1",
    "cores": 2,
    "memory_bytes": 24 * 2**30,
    "caches": {"L2": "1 MiB"},
    "gpus": None,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_id": "26-2-1"},
        {"cpu_id": "25-17-2"},
        {"cores": 4},
        {"memory_bytes": 48 * 2**30},
        {"caches": {"L2": "2 MiB"}},
        {"gpus": [{"name": "NVIDIA H200"}]},
    ],
    ids=str,
)
def test_another_machine_of_the_same_name(changes):
    assert not machine.same(ZEN4, ZEN4 | changes)
    assert machine.digest(ZEN4) != machine.digest(ZEN4 | changes)


def test_the_same_machine_with_another_kernel():
    assert machine.same(ZEN4, ZEN4 | {"memory_bytes": 24 * 2**30 - 5 * 2**20, "gpus": []})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nstepping\t: 1\n\ncpu family : 1\n",
            "25-17-1",
        ),
        (
            "CPU implementer : 0x41\nCPU part : 0xd4f\nCPU variant : 0x0\nCPU revision : 1\n",
            "0x41-0xd4f-0x0-1",
        ),
        ("processor : 0\n", ""),
    ],
)
def test_cpu_id(tmp_path, text, found):
    (tmp_path / "cpuinfo").write_text(text)
    assert machine.cpu_id(str(tmp_path / "cpuinfo")) == found
