"""The doctor on this machine, on machines that lack one part, and with a probe that hangs or breaks."""

import dataclasses
import functools
import io
import json
import pwd
import re
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from minidist.cli import commands, doctor, doctor_probe
from minidist.parallel.training import bf16_on_cpu
from tests.helpers.clocks import HANG

CPU_TORCH = {"version": "2.8.0+cpu", "cuda": None, "threads": 2, "gloo": True, "nccl": False, "devices": []}
GPU = [{"name": "NVIDIA H200", "driver": "580.65", "memory_bytes": 2**37, "compute_capability": "9.0"}]


@pytest.fixture(scope="module")
def parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "probe", functools.partial(doctor.probe, timeout=HANG))
        return doctor.examine()


def test_this_machine_can_run_the_tests(parts):
    found = {part.name: part for part in parts}
    assert found["torch"].ok
    assert found["gloo"].ok
    assert found["scikit-learn"].ok
    assert not [part.name for part in parts if part.required and not part.ok]


def test_every_missing_part_has_a_cost_and_a_remedy(parts):
    nothing = [
        doctor.blas,
        doctor.cores,
        doctor.memory,
        doctor.shared_memory,
        doctor.compiler_cache,
        doctor.matrix_unit,
    ]
    error = {"error": "ModuleNotFoundError: No module named 'it'"}
    lacking = [
        *parts,
        *(examine() for examine in nothing),
        doctor.torch(error),
        doctor.gloo(error),
        doctor.gpu(None, error),
        doctor.gpu(GPU, error),
        doctor.gpu(GPU, CPU_TORCH),
        doctor.nccl(GPU, CPU_TORCH),
        doctor.numba_cuda(error),
        doctor.library("nvvm", error),
        doctor.library("nvJitLink", error),
        doctor.ladder(error),
        doctor.extra("a-package-that-nobody-has", "bench", "its work"),
    ]
    missing = [part for part in lacking if not part.ok]
    assert len(missing) >= 9
    for part in missing:
        assert part.cost, part.name
        assert part.remedy, part.name
        assert part.found, part.name


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("AMX", "AMX: tiles of bf16 numbers in one instruction"),
        ("AVX512_BF16", "AVX512_BF16: pairs of bf16 numbers in one instruction"),
        ("", "this CPU has no bf16 products"),
    ],
)
def test_the_matrix_unit_is_named(monkeypatch, found, said):
    monkeypatch.setattr("minidist.kernels.cpu.support.bf16_instructions.matrix_unit", lambda: found)
    part = doctor.matrix_unit()
    assert (part.ok, part.found) == (bool(found), said)
    assert part.ok or "s7_threads" in part.remedy


def test_names_are_unique(parts):
    assert len({part.name for part in parts}) == len(parts)


def test_a_gpu_that_torch_cannot_use_is_told_apart():
    assert doctor.gpu(GPU, {**CPU_TORCH, "cuda": "13.0", "devices": ["NVIDIA H200"]}).ok
    cpu_build = doctor.gpu(GPU, CPU_TORCH)
    assert not cpu_build.ok
    assert "CPU-only build" in cpu_build.found
    assert "CUDA 13.0" in doctor.gpu(GPU, {**CPU_TORCH, "cuda": "13.0"}).found


def test_where_the_cuda_ladder_runs_is_told(parts):
    here = {part.name: part for part in parts}["CUDA ladder"]
    assert here.ok, here
    assert re.search("emulator|driver for CUDA", here.found)
    on_gpu = doctor.ladder({"backend": "gpu", "toolkit": 13, "gpu": "NVIDIA H200", "driver": "13.0"})
    assert on_gpu.ok
    assert on_gpu.found == "on NVIDIA H200; driver for CUDA 13.0, toolkit 13"
    assert "emulator" in doctor.ladder({"backend": "emulator", "toolkit": 13}).found


def test_a_driver_that_does_not_fit_is_told_with_its_remedy(monkeypatch):
    monkeypatch.setenv("MINIDIST_CUDA_BACKEND", "wrong")
    found = doctor.ladder(doctor_probe.attempt(doctor_probe.ladder))
    assert not found.ok
    assert found.found.startswith("MINIDIST_CUDA_BACKEND is 'wrong'")
    assert found.remedy == "set it to gpu or emulator, or unset it"


def test_libraries_have_versions(monkeypatch):
    versions = {"nvidia-nvjitlink": "13.5", "nvidia-cuda-nvrtc": "13.4"}
    monkeypatch.setattr(doctor.machine, "version", versions.get)
    assert doctor.library("nvJitLink", "site-packages").found == "13.5, from site-packages"
    assert doctor.library("nvrtc", "site-packages").found == "13.4, from site-packages"
    assert doctor.library("nvvm", "conda").found == "from conda"


def test_nccl_is_missed_only_where_there_is_a_gpu():
    assert doctor.nccl(None, CPU_TORCH).ok
    assert not doctor.nccl(GPU, CPU_TORCH).ok
    assert doctor.nccl(GPU, {**CPU_TORCH, "nccl": True}).ok


def test_one_core_is_told(monkeypatch):
    monkeypatch.setattr(doctor, "available_cores", lambda: 1)
    assert not doctor.cores().ok


def test_a_small_shared_memory_is_told(monkeypatch):
    for size, ok in ((64 * 2**20, False), (2 * 2**30, True)):
        monkeypatch.setattr(
            doctor.os, "statvfs", lambda _, size=size: SimpleNamespace(f_frsize=4096, f_blocks=size // 4096)
        )
        assert doctor.shared_memory().ok is ok
    assert doctor.shared_memory("/no/such/folder").found


def test_a_cache_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "new" / "folder"))
    assert doctor.compiler_cache().ok
    assert not (tmp_path / "new").exists()  # only looked at
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "folder"))
    found = doctor.compiler_cache()
    assert not found.ok
    assert "NUMBA_CACHE_DIR" in found.remedy


@pytest.fixture
def slow_look(monkeypatch):
    """The parts on a machine where torch was found before the time was over, and nothing after it."""
    program = f"import time; print({json.dumps({'torch': CPU_TORCH})!r}, flush=True); time.sleep(60)"
    found = doctor.probe(program, timeout=5.0)
    monkeypatch.setattr(doctor, "probe", lambda: found)
    monkeypatch.setattr(doctor.machine, "gpus", lambda: GPU)
    return doctor.examine()


def test_what_a_slow_machine_has_not_looked_at_is_not_called_missing(slow_look, monkeypatch, run):
    """Planted: a probe that takes too long said that all is missing, and how to install it."""
    parts = {part.name: part for part in slow_look}
    assert parts["torch"].ok
    assert parts["gloo"].ok
    assert {name for name, part in parts.items() if not part.looked} == {
        *("bfloat16", "numba-cuda", "NVVM", "NVRTC", "nvJitLink", "CUDA ladder")
    }
    monkeypatch.setattr(doctor, "examine", lambda: [*slow_look])
    code, out, _ = run("doctor")
    assert code == 0
    told = " ".join(out.split())
    assert "NVVM: this machine was too slow to look within 5 s." in told
    assert not re.search("NVVM is missing|pip install 'minidist.cuda|Nothing is missing", told)
    stream = io.StringIO()
    doctor.show_cuda(Console(file=stream), [part for part in slow_look if part.ok or not part.looked])
    assert stream.getvalue().startswith("It is not known whether the CUDA ladder will run here.\n")


def test_a_torch_that_was_not_looked_at_is_not_required(monkeypatch):
    late = {"error": "this machine was too slow to look within 60 s", "slow": True}
    monkeypatch.setattr(doctor, "probe", lambda: dict.fromkeys(doctor_probe.ITEMS, late))
    monkeypatch.setattr(doctor.machine, "gpus", lambda: None)
    parts = {part.name: part for part in doctor.examine()}
    assert [parts[name].required for name in ("torch", "gloo")] == [False] * 2
    assert parts["GPU"].looked  # the driver says that there is none


@pytest.mark.parametrize(
    ("outcome", "variable", "ok", "words"),
    [
        (("", True), "", True, "torch multiplies in it"),
        (("SIGILL", True), "", False, "die (SIGILL); export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"),
        (("SIGILL", True), "AVX512_CORE_FP16", True, "die (SIGILL), but not with ONEDNN_MAX_CPU_ISA=AVX512"),
        (("SIGILL", True), "ALL", False, "die (SIGILL); ONEDNN_MAX_CPU_ISA=ALL; export"),
        (("SIGILL", False), "", False, "die (SIGILL); none known, not even ONEDNN_MAX_CPU_ISA=AVX512_CORE"),
    ],
)
def test_a_fault_in_bfloat16_is_named_with_its_cure(monkeypatch, outcome, variable, ok, words):
    monkeypatch.setattr(bf16_on_cpu, "outcome", lambda: bf16_on_cpu.Outcome(*outcome))
    for name in bf16_on_cpu.NAMES:
        monkeypatch.setenv(name, variable if name == bf16_on_cpu.VARIABLE else "")
    part = doctor.bf16(doctor_probe.attempt(doctor_probe.bf16))
    assert part.ok is ok
    assert words in f"{part.found}; {part.remedy}"


def test_products_that_could_not_be_tried_are_not_called_missing(monkeypatch):
    monkeypatch.setattr(bf16_on_cpu, "outcome", lambda: None)
    found = doctor_probe.attempt(doctor_probe.bf16)
    assert not doctor.looked(found, doctor.bf16(found)).looked


def test_a_user_without_a_home_has_no_cache_there(monkeypatch):
    def nobody(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert doctor.compiler_cache().found
    monkeypatch.setattr(doctor, "writable", lambda folder: False)
    assert not doctor.compiler_cache().ok


def test_a_variable_with_which_numba_compiles_nothing_is_named(monkeypatch):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    found = doctor.compiler_cache()
    assert not found.ok
    assert found.remedy == "unset NUMBA_DISABLE_JIT"
    assert doctor.ladder(doctor_probe.attempt(doctor_probe.ladder)).remedy == found.remedy


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_c_locale_prints_what_it_can(monkeypatch, more):
    """Planted: in ASCII, Python raises UnicodeEncodeError at these letters."""
    part = doctor.MachinePart("it…", False, "2 × 3", "µs", "é")
    monkeypatch.setattr(doctor, "examine", lambda: [part])
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with pytest.raises(SystemExit) as ended:
        commands.main(["doctor", *more])
    sys.stdout.flush()
    assert ended.value.code == 0
    if more:
        assert json.loads(written.getvalue())["parts"] == [dataclasses.asdict(part)]
    else:
        assert b"2 ? 3" in written.getvalue()


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("raise ImportError('libgone.so: cannot open')", "ImportError: libgone.so: cannot open"),
        ("import os; os.abort()", "exit code -6"),
        ("print('no json')", "exit code 0"),
        ("pass", "exit code 0"),
    ],
)
def test_a_probe_that_breaks_says_why(program, error):
    found = doctor.probe(program)
    assert error in found["torch"]["error"]
    assert not doctor.torch(found["torch"]).ok
    assert not doctor.library("nvvm", found["nvvm"]).ok


def test_shown_with_remedies():
    stream = io.StringIO()
    parts = [
        doctor.MachinePart("a", True, "here"),
        doctor.MachinePart("b", False, "gone", "its work", "pip install b"),
    ]
    doctor.show(Console(file=stream, width=80), parts)
    assert "pip install b" in stream.getvalue()
    assert "its work" in stream.getvalue()


@pytest.mark.parametrize(("required", "code"), [(True, 1), (False, 0)])
def test_command_fails_only_where_a_required_part_is_missing(monkeypatch, run, required, code):
    part = doctor.MachinePart("it", False, "gone", "all of it", "pip install it", required=required)
    monkeypatch.setattr(doctor, "examine", lambda: [part])
    found, out, _ = run("doctor", "--json")
    assert found == code
    assert json.loads(out)["parts"][0]["remedy"] == "pip install it"


def test_one_block_says_whether_the_cuda_ladder_will_run() -> None:
    def printed(*parts: doctor.MachinePart) -> str:
        stream = io.StringIO()
        doctor.show_cuda(Console(file=stream, width=60), doctor.needed_for_cuda(list(parts)))
        return stream.getvalue()

    ladder = doctor.ladder({"backend": "gpu", "toolkit": 13, "gpu": "NVIDIA H100", "driver": "13.0"})
    good = printed(ladder, doctor.MachinePart("BLAS", False, "none"))
    assert good.startswith("The CUDA ladder will run here.\n")
    assert "on NVIDIA H100; driver for CUDA 13.0, toolkit 13" in good
    assert "BLAS" not in good  # the ladder does without
    bad = printed(ladder, doctor.library("nvvm", {"error": "none"}))
    assert bad.startswith("The CUDA ladder will not run on a GPU here.\n")
    assert "not found; remedy: pip install 'minidist[cuda]'" in bad
    newest = "13.0.88 in /usr/local/cuda/nvvm/lib64, the newest that is no newer than nvJitLink 13.0"
    assert doctor.library("nvvm", newest).found == newest
