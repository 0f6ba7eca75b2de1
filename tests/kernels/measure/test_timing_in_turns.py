"""Functions in turns: their order, a warm-up, and fewer rounds on a slow machine."""

from types import SimpleNamespace

import pytest

from minidist.kernels.measure import timing_in_turns
from minidist.kernels.measure.timing_in_turns import time_in_turns


def test_functions_are_timed_in_turns_after_a_warm_up():
    calls = []
    seconds = time_in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3)
    assert "".join(calls) == "ab" + "ababab"
    assert list(seconds) == ["a", "b"]
    assert all(len(times) == 3 and min(times) >= 0 for times in seconds.values())


@pytest.mark.parametrize(("each", "rounds"), [(0.0, 7), (0.9, 7), (1.5, 5), (2.0, 4), (9.0, 3), (1e9, 3)])
def test_a_slow_machine_does_fewer_rounds_and_three_at_least(each, rounds, monkeypatch):
    clock = SimpleNamespace(seconds=0.0)
    clock.perf_counter = lambda: clock.seconds
    monkeypatch.setattr(timing_in_turns, "time", clock)

    def step():
        clock.seconds += each

    found = time_in_turns({"a": step}, rounds=7, seconds=6.5)
    assert found == {"a": [pytest.approx(each)] * rounds}


def test_no_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds is 0"):
        time_in_turns({"a": lambda: None}, rounds=0)
