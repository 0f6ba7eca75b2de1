"""What is run by hand on a GPU, tried on the emulator: a rung is checked, and tuned with other constants.

And the script of a first run, up to the GPU.
"""

import importlib
import os
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")

from minidist.benchmarks.harness import cuda_smoke, cuda_tune
from minidist.benchmarks.harness.cuda import cuda_timing
from minidist.kernels import cuda
from minidist.kernels.cuda.cuda_rung import CudaRung
from minidist.kernels.cuda.runtime import device, gpu_driver
from tests.helpers.clocks import HANG
from tests.helpers.emulated_gpu import EmulatedGpu

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


@pytest.fixture
def tuned(monkeypatch):
    """The emulator is timed as a GPU, at a small size; at the end rungs have their own constants again."""
    monkeypatch.setattr(cuda_timing, "unavailable", lambda: None)
    monkeypatch.setattr(cuda_timing, "gpu", EmulatedGpu)
    monkeypatch.setattr(cuda_tune, "SIZE", 40)
    modules = [importlib.import_module(f"{cuda.__name__}.{name}") for name in ("s2_coalesced", "s10_hopper")]
    before = [dict(vars(module)) for module in modules]
    yield
    for module, names in zip(modules, before, strict=True):
        vars(module).update(names)  # other tests hold the rungs that these files made first


@pytest.mark.deep
@pytest.mark.usefixtures("tuned")
def test_constants_and_what_follows_from_them_change_and_come_back():
    module = importlib.import_module(f"{cuda.__name__}.s2_coalesced")
    before = module.KERNEL.threads
    cuda_tune.set_constants("s2_coalesced", ["ROWS=4"])
    assert module.KERNEL.threads == 4 * 32 < before
    checked, timed = cuda_tune.tune("s2_coalesced")
    assert checked.startswith("right: s2_coalesced in float32, 1 products on cpu")
    assert re.fullmatch(r"\S+ TFLOP/s, \S+ of torch.matmul's: s2_coalesced in float32, 40", timed)
    cuda_tune.set_constants("s2_coalesced", ())
    assert module.KERNEL.threads == before
    with pytest.raises(ValueError, match=r"^WAYS=4: s2_coalesced sets no WAYS; give NAME=VALUE of a line of"):
        cuda_tune.set_constants("s2_coalesced", ["WAYS=4"])


@pytest.mark.deep
@pytest.mark.parametrize(
    "settings",
    [("GROUP=4", "CLUSTER=1", "BUFFERS=4"), ("GROUP=16", "CLUSTER=4", "BUFFERS=1")],
    ids=" ".join,
)
@pytest.mark.usefixtures("tuned")
def test_rung_10_is_right_with_the_constants_of_the_first_run(monkeypatch, settings):
    """On so few multiprocessors that a cluster takes several tiles."""
    monkeypatch.setattr(gpu_driver, "multiprocessors", lambda: 4)
    monkeypatch.setattr(cuda_timing, "unavailable", lambda: "timed above")
    cuda_tune.set_constants("s10_hopper", ["COLUMNS=(256,)", *settings])
    (checked,) = cuda_tune.tune("s10_hopper")
    assert checked.startswith("right: s10_hopper in bfloat16, 1 products")
