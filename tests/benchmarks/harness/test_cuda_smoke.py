"""The first check of a rung on a GPU, tried on the emulator; and the script of a first run, up to the GPU."""

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")

from minidist.benchmarks.harness import cuda_smoke
from minidist.kernels.cuda.cuda_rung import CudaRung
from minidist.kernels.cuda.runtime import device
from tests.helpers.clocks import HANG

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setenv(device.VARIABLE, "emulator")
    monkeypatch.setattr(cuda_smoke.gpu_timer, "find", lambda: None)


def test_a_rung_is_right_in_each_of_its_dtypes():
    lines = list(cuda_smoke.smoke("s2_coalesced"))
    assert [line.partition(", largest")[0] for line in lines] == [
        "right: s2_coalesced in float32, 3 products on cpu",
        "right: s2_coalesced in float64, 3 products on cpu",
    ]


def test_a_rung_of_attention_is_right_in_each_of_its_dtypes():
    lines = list(cuda_smoke.smoke_attention("s4_tensor_core"))
    assert [line.partition(", largest")[0] for line in lines] == [
        "right: s4_tensor_core in float16 on cpu",
        "right: s4_tensor_core in bfloat16 on cpu",
    ]


def test_a_wrong_rung_is_named_with_its_product(monkeypatch):
    multiply = CudaRung.matmul

    def wrong(self, a, b, out):
        multiply(self, a, b, out)
        out[-1, -1] += 1

    monkeypatch.setattr(CudaRung, "matmul", wrong)
    with pytest.raises(AssertionError, match="rung s2_coalesced, 33 x 40 x 24 in float32, nn: 1 of 1320"):
        list(cuda_smoke.smoke("s2_coalesced"))


def test_the_script_of_a_first_run_names_what_it_can_not_do(tmp_path):
    """Each command has a limit, a failure ends only its own command, and the log is complete."""
    (tmp_path / "python").write_text('#!/bin/bash\necho "ran: $*"\n[[ "$*" != *s9_tensor_core* ]]\n')
    (tmp_path / "python").chmod(0o755)
    env = {**os.environ, "OUT": str(tmp_path / "out"), "PYTHON": str(tmp_path / "python")}

    def first_run(*words):
        command = ["bash", "benchmarks/first_run.sh", *words]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG)

    done = first_run("smoke")
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "out" / "log-smoke-1-of-2.txt").read_text()
    assert "ran: -m minidist bench cuda --compile" in log
    assert log.count("ran: -m minidist.benchmarks.harness.cuda_smoke") == 15
    assert "exit code 1: " in log
    assert log.index("cuda_smoke s10_hopper") < log.index("cuda_smoke s1_naive")  # the best first
    assert "-k test_rung and (4096 or 8192) --out" in log
    first_run("attention")
    log = (tmp_path / "out" / "log-attention-1-of-2.txt").read_text()
    assert log.index("cuda_smoke s5_backward") < log.index("bench cuda -k test_attention")
    first_run("full", "2/2")
    assert "--full --part 2/2" in (tmp_path / "out" / "log-full-2-of-2.txt").read_text()
    first_run("tune")
    log = (tmp_path / "out" / "log-tune-1-of-2.txt").read_text()
    runs = [line.split()[4:] for line in log.splitlines() if "harness.cuda_tune s10_hopper" in line]
    assert len({*map(tuple, runs)}) == len(runs) == 27
    assert runs[0] == ["COLUMNS=(256,)", "GROUP=8", "CLUSTER=2", "BUFFERS=2"]  # the rung's own first
    first_run("faults")
    log = (tmp_path / "out" / "log-faults-1-of-2.txt").read_text()
    assert log.index("mistakes.silicon --compile") < log.index("mistakes.silicon --gpu --out")
    assert first_run("everything").returncode == 2
