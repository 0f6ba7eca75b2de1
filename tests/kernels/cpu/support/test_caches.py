"""The sizes of caches, read from folders and texts such as other machines have."""

import os
import subprocess
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given

from minidist.kernels.cpu.support import caches as module
from minidist.kernels.cpu.support.caches import Caches, available_cpus, caches, from_sysctl, from_sysfs

KIB, MIB = 2**10, 2**20


def describe(root, cpu, *indices):
    """Write what Linux says about a CPU's caches: (level, type, size, shared_cpu_list) each."""
    for i, values in enumerate(indices):
        folder = root / f"cpu{cpu}" / "cache" / f"index{i}"
        folder.mkdir(parents=True)
        for name, value in zip(("level", "type", "size", "shared_cpu_list"), values, strict=True):
            if value is not None:
                (folder / name).write_text(f"{value}\n")


def usual(cpu, l3=None, shared="0-1"):
    found = [
        (1, "Instruction", "64K", cpu),
        (1, "Data", "48K", cpu),
        (2, "Unified", "1280K", cpu),
    ]
    return [*found, (3, "Unified", l3, shared)] if l3 else found


def test_several_l3_caches_are_added_each_once(tmp_path):
    for cpu in range(8):
        shared = "0-1,4-5" if cpu in (0, 1, 4, 5) else "2-3,6-7"
        describe(tmp_path, cpu, *usual(cpu, "32768K", shared))
    found = from_sysfs(tmp_path, range(8))
    assert (found.l3, found.l3_total) == (32 * MIB, 64 * MIB)
    assert from_sysfs(tmp_path, [2, 3, 7]).l3_total == 32 * MIB


def test_the_first_cpu_that_the_process_may_use_speaks(tmp_path):
    """As on a CPU with fast cores and small ones, each kind below an L3 of its own."""
    describe(tmp_path, 0, (1, "Data", "32K", 0), (2, "Unified", "256K", 0), (3, "Unified", "4M", 0))
    describe(tmp_path, 5, *usual(5, "8M", "5-6"))
    assert from_sysfs(tmp_path, [0, 5]) == Caches(32 * KIB, 256 * KIB, 4 * MIB, 12 * MIB)
    assert from_sysfs(tmp_path, [5, 6]) == Caches(48 * KIB, 1280 * KIB, 8 * MIB, 8 * MIB)


def test_a_cpu_without_an_l3_has_its_other_caches(tmp_path):
    describe(tmp_path, 0, *usual(0))
    found = from_sysfs(tmp_path, [0, 1, 2])
    assert found == Caches(l1_data=48 * KIB, l2=1280 * KIB)


@pytest.mark.parametrize("missing", range(4))
@pytest.mark.parametrize("value", [None, "", "unknown"])
def test_what_is_missing_or_unreadable_is_left_at_the_default(tmp_path, missing, value):
    values = [2, "Unified", "1280K", 0]
    values[missing] = value
    describe(tmp_path, 0, (1, "Data", "48K", 0), tuple(values))
    found = from_sysfs(tmp_path, [0])
    assert found.l1_data == 48 * KIB
    # A type that nothing names is taken for data.
    assert found.l2 in ((1280 * KIB, Caches().l2) if missing == 1 else (Caches().l2,))


@given(cpus=st.sets(st.integers(0, 300), min_size=1))
def test_cpu_lists_have_ranges(cpus):
    ranges = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    text = ",".join(f"{first}-{last}" if first != last else f"{first}" for first, last in ranges)
    assert module._cpu_list(text + "\n") == cpus


def test_macos_says_the_sizes_of_its_fast_cores():
    text = """hw.perflevel0.l1dcachesize: 131072
hw.l1dcachesize: 65536
hw.perflevel0.l2cachesize: 12582912
hw.l2cachesize: 4194304
"""
    assert from_sysctl(text) == Caches(l1_data=128 * KIB, l2=12 * MIB)


@pytest.mark.parametrize("platform", ["linux", "darwin"])
@pytest.mark.parametrize("error", [OSError("no"), ValueError("no"), subprocess.TimeoutExpired("sysctl", 5)])
def test_nothing_is_raised_where_the_system_keeps_silent(monkeypatch, platform, error):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(module, "from_sysfs", refuse)
    assert caches.__wrapped__() == Caches()


def test_here_sizes_are_plausible():
    found = caches()
    assert 8 * KIB <= found.l1_data <= found.l2
    assert found.l3_total >= found.l3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_only_the_cpus_that_the_process_may_use_count():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(before)})
        assert available_cpus() == [max(before)]
    finally:
        os.sched_setaffinity(0, before)
    assert available_cpus() == sorted(before)
