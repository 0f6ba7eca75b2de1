"""The times of calls on CUDA tensors are the GPU's, not those of launches; on a stream of the tests."""

from __future__ import annotations

import pytest
import torch

from minidist import comm
from minidist.comm.ledgers import Call
from minidist.comm.work import Work
from minidist.scale.trace.record_events import Calls


class Stream:
    """A GPU's queue, in which time passes only as the test says; the process does not wait for it."""

    now = 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at, self.reached = Stream.now, False

        def synchronize(self) -> None:
            self.reached = True

        def elapsed_time(self, end: Stream.Event) -> float:
            assert end.reached
            return 1e3 * (end.at - self.at)


class Nccl:
    """A handle whose `wait` keeps the stream waiting, and returns at once."""

    def __init__(self, until: float) -> None:
        self.until = until

    def wait(self) -> None:
        Stream.now = max(Stream.now, self.until)


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Stream.Event)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(Stream, "now", 100.0)


def reduced(seconds: float, compute: float) -> Work:
    """An all-reduce that takes `seconds`, while the stream computes for `compute` seconds."""
    call = Call("all_reduce", "torch", "float32", (8,), (0, 1), 32, on_gpu=True)
    work = Work(call, lambda at_once: Nccl(Stream.now + seconds), lambda: None, True)
    Stream.now += compute
    return work


def test_the_ledger_has_the_gpus_seconds() -> None:
    with comm.ledger() as ledger:
        reduced(5, 2).wait()
        reduced(5, 7).wait()
    first, second = ledger.calls
    assert (first.seconds, first.waited) == (5.0, 3.0)
    assert (second.seconds, second.waited) == (7.0, 0.0)  # it ended before it was waited for; nobody saw when
    assert (ledger.seconds, ledger.comm_overlap) == (12.0, 0.75)


def test_a_call_that_ends_after_its_ledger_was_closed_settles_when_it_is_read() -> None:
    with comm.ledger() as ledger:
        work = reduced(5, 1)
    assert ledger.calls[0].seconds == 0.0
    work.wait()
    assert ledger.seconds == 5.0


def test_the_trace_shows_when_the_gpu_ran_it() -> None:
    calls = Calls()
    calls.open()
    Stream.now += 10  # work of the step, before the call
    with comm.ledger():
        reduced(4, 1).wait()
    calls.close()
    held, (slice_,), messages = calls.slices()
    assert slice_.end - slice_.start == pytest.approx(4.0)
    assert slice_.start - calls._anchored == pytest.approx(10.0)
    assert not held
    assert not messages
