"""A GPU's peaks, with a torch whose GPU has a clock of its own and rates that are known."""

import contextlib
import importlib.util
import sys
from types import SimpleNamespace

import pytest

from minidist.kernels.measure import gpu_peaks
from tests.kernels.measure import test_gpu_timer

RATES = {"float32": 50e12, "tf32": 400e12, "float16": 800e12, "bfloat16": 790e12, "float64": 60e12}
COPY = 4e12  # bytes read and written in a second


class FakeTorch(test_gpu_timer.FakeTorch):
    """As much of torch as measuring takes; its host waits for each call."""

    def __init__(self, memory=2**37, capability=(9, 0), available=True):
        super().__init__(sleeps=False)
        self.calls = 0
        self.precision = "highest"
        self.memory, self.biggest, self.emptied = memory, 0, False
        self.products = []
        for name, size in [("float32", 4), ("float16", 2), ("bfloat16", 2), ("float64", 8), ("uint8", 1)]:
            setattr(self, name, SimpleNamespace(name=name, itemsize=size))
        vars(self.cuda).update(
            is_available=lambda: available,
            get_device_capability=lambda: capability,
            get_device_name=lambda: "a GPU",
            mem_get_info=lambda: (self.memory, self.memory),
            empty_cache=lambda: setattr(self, "emptied", True),
        )

    def get_float32_matmul_precision(self):
        return self.precision

    def set_float32_matmul_precision(self, precision):
        assert precision in ("highest", "high", "medium")
        self.precision = precision

    def _tensor(self, *shape, device, dtype):
        assert device == "cuda"
        elements = 1
        for size in shape:
            elements *= size
        self.biggest = max(self.biggest, elements * dtype.itemsize)
        tensor = SimpleNamespace(shape=shape, dtype=dtype)
        tensor.copy_ = lambda source: self._work(2 * elements * dtype.itemsize / COPY)
        return tensor

    randn = empty = ones = _tensor

    def matmul(self, a, b, out):
        assert a.shape == b.shape == out.shape
        assert a.dtype is b.dtype is out.dtype
        kind = "tf32" if a.dtype.name == "float32" and self.precision != "highest" else a.dtype.name
        n = a.shape[0]
        self.products.append((kind, n))
        self._work(2 * n**3 / RATES[kind])

    def _work(self, seconds):
        self.calls += 1
        # The first call of any kind also loads a library.
        self.work(seconds + (1.0 if self.calls == 1 else 0.0), launch=0)
        self.host = self.gpu


@pytest.fixture
def with_torch(monkeypatch):
    def install(torch):
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        return torch

    return install


def test_the_rates_of_the_gpu_are_found(with_torch):
    torch = with_torch(FakeTorch())
    roof = gpu_peaks.roof(seconds=0.01)
    assert roof.name == "a GPU"
    assert roof.flops == pytest.approx(RATES)
    assert roof.bandwidth == pytest.approx(COPY)
    assert set(torch.products) == set(gpu_peaks.SIZES.items())
    assert torch.emptied


def test_time_is_bounded_by_what_was_asked(with_torch):
    torch = with_torch(FakeTorch())
    gpu_peaks.roof(seconds=0.01)
    calls = [2 * n**3 / RATES[kind] for kind, n in gpu_peaks.SIZES.items()] + [2 * gpu_peaks.COPY / COPY]
    # For each figure one call, the first of which loads a library; then 10 ms, and the calls that pass them.
    assert 6 * 0.01 < torch.gpu - 1 < sum(0.01 + (1 + gpu_peaks.CALLS) * call for call in calls)


@pytest.mark.parametrize("before", ["highest", "high"])
def test_the_precision_of_float32_is_as_it_was_also_after_an_error(with_torch, before):
    torch = with_torch(FakeTorch())
    torch.precision = before
    gpu_peaks.roof(seconds=0.001)
    assert torch.precision == before
    torch.matmul = None
    with contextlib.suppress(TypeError):
        gpu_peaks.roof(seconds=0.001)
    assert torch.precision == before


def test_old_gpus_have_no_tf32_and_no_bfloat16(with_torch):
    with_torch(FakeTorch(capability=(7, 5)))
    assert list(gpu_peaks.roof(seconds=0.001).flops) == ["float32", "float16", "float64"]


def test_a_small_memory_gets_small_matrices(with_torch):
    torch = with_torch(FakeTorch(memory=2**28))
    roof = gpu_peaks.roof(seconds=0.001)
    assert roof.flops == pytest.approx(RATES)
    assert torch.biggest <= 2**26
    assert dict(torch.products) == {
        "float32": 2048,
        "tf32": 2048,
        "float16": 4096,
        "bfloat16": 4096,
        "float64": 2048,
    }


def test_without_a_gpu_or_without_torch_there_is_no_roof(with_torch, monkeypatch):
    with_torch(FakeTorch(available=False))
    assert gpu_peaks.roof() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it would raise
    assert gpu_peaks.roof() is None


def test_the_fake_has_what_torch_has():
    """Each name that this fake and the timer's stand for, on the torch that is installed."""
    import torch

    fake = FakeTorch()
    for name in ("randn", "empty", "ones", "matmul", "get_float32_matmul_precision", "float16", "uint8"):
        assert hasattr(torch, name)
    for name in vars(fake.cuda):
        assert hasattr(torch.cuda, name)
    assert torch.float64.itemsize == 8
    for method in ("record", "query", "elapsed_time"):
        assert callable(getattr(torch.cuda.Event, method))
    assert callable(torch.cuda._sleep)
    assert callable(torch.Tensor.copy_)
    before = torch.get_float32_matmul_precision()
    for precision in ("high", "highest", before):
        torch.set_float32_matmul_precision(precision)
        assert torch.get_float32_matmul_precision() == precision
