"""How products are timed on a GPU: in turn, on fresh and rotating operands; and where they can't be."""

import contextlib
import itertools

import pytest
import torch

from minidist.benchmarks.harness.cuda import cuda_timing
from minidist.benchmarks.harness.cuda.cuda_timing import (
    Gpu,
    Operands,
    float32_as,
    host_seconds,
    time_on_gpu,
)
from minidist.kernels.cuda.cuda_rung import CudaRung
from minidist.kernels.cuda.runtime import device
from tests.helpers.emulated_gpu import EmulatedGpu


class Clocked(EmulatedGpu):
    """A GPU on which a program takes what it returns."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.turns = []

    def seconds(self, program, calls=1):
        total = sum(program() for _ in range(calls))
        self.turns.append((total, calls))
        return total / calls


def test_operands_are_random_and_none_is_near_0():
    (a, b, c), *_ = Operands(EmulatedGpu(), (60, 70, 50), "float64", seed=1).sets
    assert (a.shape, b.shape, c.shape) == ((60, 50), (50, 70), (60, 70))
    for x in (a, b):
        assert 0.5 <= x.abs().min() < x.abs().max() < 1.5
        assert abs(float(x.mean())) < 0.1
        assert len(x.unique()) > 0.99 * x.numel()
    again = Operands(EmulatedGpu(), (60, 70, 50), "float64", seed=1).sets[0]
    torch.testing.assert_close(a, again[0], rtol=0, atol=0)
    assert not torch.equal(a, Operands(EmulatedGpu(), (60, 70, 50), "float64", seed=2).sets[0][0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sets_fill_the_cache_twice_before_one_comes_again(dtype):
    l2 = 50_000
    operands = Operands(EmulatedGpu(l2=l2), (32, 32, 32), dtype, seed=1)
    size = 3 * 32 * 32 * operands.sets[0][0].itemsize
    assert (len(operands.sets) - 1) * size <= 2 * l2 < len(operands.sets) * size
    taken = [operands.next() for _ in range(2 * len(operands.sets))]
    addresses = [a.data_ptr() for a, _, _ in taken]
    assert addresses == 2 * addresses[: len(operands.sets)]
    assert len(set(addresses)) == len(operands.sets)


def test_one_set_is_enough_where_it_fills_the_cache_itself():
    assert len(Operands(EmulatedGpu(l2=1000), (32, 32, 32), "float32", seed=1).sets) == 1


@pytest.mark.parametrize("order", cuda_timing.ORDERS)
def test_transposed_operands_are_views_of_what_lies_the_other_way(order):
    a, b, c = Operands(EmulatedGpu(), (10, 20, 30), "float32", order, seed=1).next()
    assert (a.shape, b.shape, c.shape) == ((10, 30), (30, 20), (10, 20))
    assert a.stride() == ((1, 10) if order[0] == "t" else (30, 1))
    assert b.stride() == ((1, 30) if order[1] == "t" else (20, 1))
    assert c.is_contiguous()


def test_what_does_not_fit_the_memory_is_said():
    with pytest.raises(MemoryError, match=r"^512 x 512 x 512 in float32 takes .* GiB, more than is free$"):
        Operands(EmulatedGpu(free=2**20), (512, 512, 512), "float32", seed=1)


def test_two_programs_are_timed_in_turn():
    called = []
    gpu = Clocked()
    seconds = time_on_gpu(
        gpu,
        lambda: called.append("A") or 0.002,
        lambda: called.append("B") or 0.004,
        budget=0.06,
    )
    # One call of each, to see how long it takes; a pair to warm up, then ten.
    assert "".join(called) == "AB" + "AB" * (1 + 10)
    assert seconds == ([0.002] * 10, [0.004] * 10)


def test_slow_programs_run_no_more_than_they_must():
    gpu = Clocked()
    time_on_gpu(gpu, lambda: 2.0, lambda: 0.1, budget=0.5)
    assert len(gpu.turns) == 2 * (1 + cuda_timing.FEWEST_SLOW_ROUNDS)


def test_a_launch_is_timed_on_the_host_and_the_gpu_is_idle_before(monkeypatch):
    gpu, clock = EmulatedGpu(), itertools.count()
    monkeypatch.setattr(cuda_timing.time, "perf_counter", lambda: float(next(clock)))
    calls = []
    assert host_seconds(gpu, lambda: calls.append(gpu.waits), 50) == 1 / 50
    assert calls == [1] * 50
    assert gpu.waits == 2


@pytest.mark.parametrize(("kind", "precision"), [("tf32", "high"), ("float32", "highest")])
def test_float32_is_multiplied_as_asked_and_then_as_before(kind, precision):
    before = torch.get_float32_matmul_precision()
    with float32_as(kind):
        assert torch.get_float32_matmul_precision() == precision
    with contextlib.suppress(ZeroDivisionError), float32_as(kind):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before


def test_without_a_gpu_one_sentence_says_what_there_is_instead(monkeypatch):
    monkeypatch.delenv(device.VARIABLE, raising=False)
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    reason = cuda_timing.unavailable()
    assert reason.startswith("there is no NVIDIA GPU: with a GPU, `minidist bench cuda` checks each rung")
    assert "emulator" in reason
    assert "\n" not in reason
    monkeypatch.setenv(device.VARIABLE, "emulator")
    assert cuda_timing.unavailable().startswith("MINIDIST_CUDA_BACKEND is 'emulator', and this measures")


def test_what_keeps_a_gpu_from_being_measured_is_said(monkeypatch):
    monkeypatch.delenv(device.VARIABLE, raising=False)
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "require_compiler", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "can't use this machine's GPU" in cuda_timing.unavailable()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cuda_timing.unavailable() is None

    def lacking():
        raise ImportError("kernels are compiled with nvvm, which was not found: pip install it")

    monkeypatch.setattr(device, "require_compiler", lacking)
    assert cuda_timing.unavailable() == "kernels are compiled with nvvm, which was not found: pip install it"

    def old():
        raise RuntimeError("the driver of this GPU is for CUDA 11.4: update it")

    monkeypatch.setattr(device, "has_gpu", old)
    assert cuda_timing.unavailable() == "the driver of this GPU is for CUDA 11.4: update it"


def test_torchs_gpu_tells_what_is_asked_of_it(monkeypatch):
    from minidist.kernels.cuda.runtime import gpu_driver as driver
    from minidist.kernels.measure import gpu_peaks

    class Driver:
        def here(self):
            return driver.Properties("NVIDIA Fake", (8, 0), 108, 40 << 20, 2**36, 163 * 1024, "13.0", True)

    measured = []
    monkeypatch.setattr(driver, "get", Driver)
    monkeypatch.setattr(gpu_peaks, "roof", lambda: measured.append(1) or "a roof")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (123, 456))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Fake")
    gpu = Gpu(torch)
    assert (gpu.device, gpu.l2(), gpu.free()) == ("cuda", 40 << 20, 123)
    assert gpu.roof == gpu.roof == "a roof"
    assert measured == [1]
    plain, hopper = (
        CudaRung(1, "s1_x", "cuda", "", ("float32",), lambda a, b, c: None, architecture=architecture)
        for architecture in ("sm_80", "sm_90a")
    )
    assert gpu.refuses(plain) is None
    assert "rung s1_x uses instructions that only compute capability 9.0 has" in gpu.refuses(hopper)


def test_a_gpu_whose_peaks_fail_has_none(monkeypatch):
    from minidist.kernels.measure import gpu_peaks

    def full():
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(gpu_peaks, "roof", full)
    assert Gpu(torch).roof is None
