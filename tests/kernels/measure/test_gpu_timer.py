"""The GPU's clock, with a torch whose GPU works beside a host that is slower to launch than it is to do."""

from types import SimpleNamespace

import pytest

from minidist.kernels.measure import gpu_timer
from minidist.kernels.measure.gpu_timer import GpuTimer

CLOCK = 2e9  # cycles a second


class FakeTorch:
    """A host and a GPU, each with its own time in seconds; the GPU begins what it has when it is free."""

    def __init__(self, sleeps=True):
        self.host, self.gpu, self.slept = 0.0, 0.0, 0
        self.cuda = SimpleNamespace(Event=self.event, is_available=lambda: True)
        if sleeps:
            self.cuda._sleep = self.sleep

    def event(self, enable_timing=False):
        event = SimpleNamespace(at=None)

        def record():
            event.at = max(self.gpu, self.host)

        def elapsed_time(end):
            assert enable_timing
            return (end.at - event.at) * 1e3

        event.record, event.elapsed_time = record, elapsed_time
        event.query = lambda: self.host >= event.at
        return event

    def sleep(self, cycles):
        assert isinstance(cycles, int)
        self.slept += 1
        self.work(cycles / CLOCK)

    def work(self, seconds, launch=5e-6):
        self.host += launch
        self.gpu = max(self.gpu, self.host) + seconds


@pytest.fixture
def torch(monkeypatch):
    return installed(monkeypatch, FakeTorch())


def installed(monkeypatch, torch):
    def wait(seconds):
        torch.host += seconds

    monkeypatch.setattr(gpu_timer, "time", SimpleNamespace(monotonic=lambda: torch.host, sleep=wait))
    return torch


@pytest.mark.parametrize("launch", [1e-6, 30e-6, 300e-6])
@pytest.mark.parametrize("work", [3e-6, 40e-6, 2e-3])
@pytest.mark.parametrize("calls", [1, 20])
def test_the_time_is_the_gpus_however_slow_python_is(torch, launch, work, calls):
    measured = GpuTimer(torch).seconds(lambda: torch.work(work, launch), calls)
    assert measured == pytest.approx(work, rel=1e-6)


def test_without_a_way_to_hold_the_gpu_short_work_counts_its_launches(monkeypatch):
    torch = installed(monkeypatch, FakeTorch(sleeps=False))
    timer = GpuTimer(torch)
    assert timer.seconds(lambda: torch.work(3e-6, 30e-6), 10) == pytest.approx(30e-6, rel=0.1)
    assert timer.seconds(lambda: torch.work(3e-3, 30e-6), 10) == pytest.approx(3e-3, rel=0.01)


def test_a_program_that_waits_itself_is_timed_too(torch):
    """Python then never gets ahead of the GPU, however long that is held."""

    def program():
        torch.work(1e-3)
        torch.host = torch.gpu

    assert GpuTimer(torch).seconds(program, 3) == pytest.approx(1e-3, rel=0.02)


def test_the_program_runs_as_often_as_asked(torch):
    calls = []
    GpuTimer(torch).seconds(lambda: calls.append(torch.work(1e-3)), 7)
    assert len(calls) == 7


def test_how_fast_the_gpus_clock_is_is_learned_once(torch):
    timer = GpuTimer(torch)
    for _ in range(3):
        timer.seconds(lambda: torch.work(1e-3))
    assert torch.slept == 2 + 3


def test_wait_returns_when_the_gpu_is_done(torch):
    torch.work(0.5)
    GpuTimer(torch).wait()
    assert torch.host >= torch.gpu


def test_a_kernel_that_never_ends_is_an_error_that_says_so(torch):
    timer = GpuTimer(torch)
    torch.work(1e9)
    with pytest.raises(RuntimeError, match=r"^the GPU has not finished in 30 s: a kernel never ends"):
        timer.wait()


def test_there_is_a_clock_only_where_torch_has_a_gpu(monkeypatch):
    import torch as real

    monkeypatch.setattr(real.cuda, "is_available", lambda: False)
    assert gpu_timer.find() is None
    monkeypatch.setattr(real.cuda, "is_available", lambda: True)
    assert isinstance(gpu_timer.find(), GpuTimer)
    monkeypatch.setattr(gpu_timer.importlib.util, "find_spec", lambda name: None)
    assert gpu_timer.find() is None
