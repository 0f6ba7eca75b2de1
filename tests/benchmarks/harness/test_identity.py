"""Machines are told apart by family, model and stepping, caches, cores, memory and GPUs; never by name."""

import pytest

from minidist.benchmarks.harness import identity

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
    assert not identity.same(ZEN4, ZEN4 | changes)
    assert identity.digest(ZEN4) != identity.digest(ZEN4 | changes)


def test_the_same_machine_with_another_kernel():
    assert identity.same(ZEN4, ZEN4 | {"memory_bytes": 24 * 2**30 - 5 * 2**20, "gpus": []})


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
    assert identity.cpu_id(str(tmp_path / "cpuinfo")) == found
