"""A rung with other constants, tried on the emulator: it is another kernel, checked and timed in one line."""

import importlib
import re

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")

from minidist.benchmarks.harness import cuda_smoke, cuda_tune
from minidist.benchmarks.harness.cuda import cuda_timing
from minidist.kernels import cuda
from minidist.kernels.cuda.runtime import device, gpu_driver
from tests.helpers.emulated_gpu import EmulatedGpu


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setenv(device.VARIABLE, "emulator")
    monkeypatch.setattr(cuda_smoke.gpu_timer, "find", lambda: None)
    monkeypatch.setattr(cuda_timing, "unavailable", lambda: None)
    monkeypatch.setattr(cuda_timing, "gpu", EmulatedGpu)
    monkeypatch.setattr(cuda_tune, "SIZE", 40)
    modules = [importlib.import_module(f"{cuda.__name__}.{name}") for name in ("s2_coalesced", "s10_hopper")]
    before = [dict(vars(module)) for module in modules]
    yield
    for module, names in zip(modules, before, strict=True):
        vars(module).update(names)  # other tests hold the rungs that these files made first


@pytest.mark.deep
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
def test_rung_10_is_right_with_the_constants_of_the_first_run(monkeypatch, settings):
    """On so few multiprocessors that a cluster takes several tiles."""
    monkeypatch.setattr(gpu_driver, "multiprocessors", lambda: 4)
    monkeypatch.setattr(cuda_timing, "unavailable", lambda: "timed above")
    cuda_tune.set_constants("s10_hopper", ["COLUMNS=(256,)", *settings])
    (checked,) = cuda_tune.tune("s10_hopper")
    assert checked.startswith("right: s10_hopper in bfloat16, 1 products")
