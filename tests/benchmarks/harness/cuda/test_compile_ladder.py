"""The CUDA ladder compiled ahead: what a GPU then launches is found, and needs no compiler."""

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")

from minidist.benchmarks.harness.cuda import compile_ladder, cuda_timing
from minidist.benchmarks.harness.cuda.compile_ladder import Variant
from minidist.kernels.cuda import RUNGS, attention, load
from minidist.kernels.cuda.runtime import compiler, device
from tests.helpers import fake_driver


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIDIST_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(device.VARIABLE, "emulator")
    monkeypatch.setattr(cuda_timing, "SIZES", (128,))


@pytest.mark.deep
def test_a_gpu_finds_all_that_was_compiled_ahead(monkeypatch):
    rung = load("s4_thread_tile_1d")
    fake_driver.install(monkeypatch, fake_driver.FakeDriver(), run=False)
    line = compile_ladder.compile_variant(Variant(rung.name, "float32", "nn"), (9, 0))
    assert line.startswith("s4_thread_tile_1d float32 nn")
    assert "for sm_90, at most" in line
    monkeypatch.setenv(device.VARIABLE, "gpu")
    compiled = []
    monkeypatch.setattr(compiler, "compile_cubin", lambda function, *_: compiled.append(function.__name__))
    for m, n, k in ((64, 64, 64), (300, 130, 65)):
        a, b = (np.ones(shape, np.float32) for shape in ((m, k), (k, n)))
        rung.matmul(a, b)
    assert compiled == []


def test_every_rung_of_a_gpu_is_compiled_and_the_others_are_named():
    found, left_out = compile_ladder.variants((9, 0))
    assert found[0].rung == "s10_hopper"  # the slowest first
    assert {variant.rung for variant in found} == {*RUNGS, *attention.RUNGS}
    assert left_out == []
    found, left_out = compile_ladder.variants((8, 0))
    assert "s10_hopper" not in {variant.rung for variant in found}
    (reason,) = left_out
    assert "s10_hopper" in reason


def test_attention_is_compiled_ahead():
    line = compile_ladder.compile_variant(Variant("s2_warp_rows", "float32", "causal"), (9, 0))
    assert line.startswith("s2_warp_rows float32 causal")
    assert "1 kernels for sm_90" in line


def test_launches_are_made_again_afterwards():
    with compile_ladder.noted() as launches:
        load("s2_coalesced").matmul(np.ones((3, 4), np.float32), np.ones((4, 5), np.float32))
    assert [kernel.name for kernel, _ in launches]
    c = load("s2_coalesced").matmul(np.ones((3, 4), np.float32), np.ones((4, 5), np.float32))
    assert (c == 4).all()


def test_the_gpu_is_known_without_being_used(monkeypatch):
    monkeypatch.setattr(compile_ladder.machine, "gpus", lambda: [{"compute_capability": "8.6"}])
    assert compile_ladder.this_gpu() == (8, 6)
    monkeypatch.setattr(compile_ladder.machine, "gpus", lambda: None)
    assert compile_ladder.this_gpu() == (9, 0)
