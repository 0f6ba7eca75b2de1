"""Two programs in turn: order, ratio, a planted slowdown, drift; on a clock that the test moves."""

import statistics
from types import SimpleNamespace

import pytest

from minidist.benchmarks.harness import turns
from minidist.benchmarks.harness.turns import REPLAY, compare, compared, quartiles, record
from tests.helpers.clocks import Clock
from tests.helpers.refusals import refuses


class FakeBenchmark:
    """What pytest-benchmark's fixture does of pedantic mode, with a timer of choice, and the median."""

    def __init__(self, timer=REPLAY.now, disabled=False):
        self.timer, self.disabled, self.extra_info, self.group = timer, disabled, {}, None
        self.stats = SimpleNamespace(stats=SimpleNamespace(data=[]))

    def pedantic(self, target, *, rounds=1):
        if self.disabled:
            return target()
        for _ in range(rounds):
            start = self.timer()
            target()
            self.stats.stats.data.append(self.timer() - start)
        self.stats.stats.median = statistics.median(self.stats.stats.data)
        return None


def program(clock, seconds, calls=None, name=""):
    """A function that takes `seconds` of the clock: a number, or one for each moment."""

    def run():
        if calls is not None:
            calls.append(name)
        clock.sleep(seconds(clock.now) if callable(seconds) else seconds)

    return run


@pytest.mark.parametrize("slowdown", [1.0, 0.5, 3.0])
def test_a_planted_slowdown_is_the_ratio(slowdown):
    clock, benchmark = Clock(), FakeBenchmark()
    ours, peer = program(clock, 0.010 * slowdown), program(clock, 0.010)
    turns.turns(benchmark, ours, peer, peer_name="the peer", rounds=7, clock=clock.perf_counter)
    extra = benchmark.extra_info
    assert extra["ratio"] == pytest.approx(slowdown)
    assert (extra["pair_ratio_q1"], extra["pair_ratio_q3"]) == pytest.approx((slowdown, slowdown))
    assert (extra["peer"], extra["peer_median"], extra["peer_iqr"]) == (
        "the peer",
        pytest.approx(0.010),
        pytest.approx(0),
    )
    assert benchmark.stats.stats.data == pytest.approx([0.010 * slowdown] * 7)


def test_programs_run_in_turn():
    clock, calls = Clock(), []
    ours, peer = program(clock, 0.01, calls, "A"), program(clock, 0.02, calls, "B")
    turns.turns(FakeBenchmark(), ours, peer, peer_name="peer", rounds=3, clock=clock.perf_counter)
    # Two calls of each to see how long it takes, then the turns.
    assert "".join(calls) == "AABB" + "ABABAB"


def test_drift_leaves_the_ratio_alone():
    """A machine that slows down fivefold while it is measured: either median is off, their ratio is not."""
    clock, benchmark = Clock(), FakeBenchmark()

    def drifting(seconds):
        return lambda now: seconds * (1 + now)

    ours, peer = program(clock, drifting(0.010)), program(clock, drifting(0.010))
    turns.turns(benchmark, ours, peer, peer_name="peer", rounds=101, clock=clock.perf_counter)
    times = benchmark.stats.stats.data
    assert times[-1] / times[0] > 5
    assert benchmark.extra_info["ratio"] == pytest.approx(1.0, rel=0.02)
    # One after the other the same programs would look three times apart.
    assert statistics.median(times[51:]) / statistics.median(times[:50]) > 2


def test_a_short_program_is_called_often_enough_for_the_clock_and_never_cold():
    clock, benchmark, calls = Clock(), FakeBenchmark(), []

    def cold_at_first(now):
        cold = calls[-2:-1] != ["short"]  # what ran before was something else
        return 0.000_010 * (10 if cold else 1)

    ours = program(clock, 0.050, calls, "long")
    peer = program(clock, cold_at_first, calls, "short")
    turns.turns(benchmark, ours, peer, peer_name="peer", rounds=5, clock=clock.perf_counter)
    assert benchmark.extra_info["peer_median"] == pytest.approx(0.000_010)
    assert calls.count("short") == pytest.approx(5 * 100, rel=0.1)
    assert calls.count("long") == 2 + 5


def test_a_budget_bounds_the_rounds():
    for seconds, rounds in ((1.0, 5), (0.1, 10), (0.0001, 100)):  # equal programs: no round is saved
        clock, benchmark = Clock(), FakeBenchmark()
        both = program(clock, seconds), program(clock, seconds)
        turns.turns(benchmark, *both, peer_name="peer", budget=2.0, clock=clock.perf_counter)
        assert len(benchmark.stats.stats.data) == rounds


@pytest.mark.parametrize(
    ("slowdown", "rounds"), [(3.0, 3), (0.4, 3), (1.5, 5), (0.6, 5), (1.05, 100), (1.0, 100)]
)
def test_rounds_end_early_only_where_the_difference_is_large(slowdown, rounds):
    clock, benchmark = Clock(), FakeBenchmark()
    both = program(clock, 0.001 * slowdown), program(clock, 0.001)
    turns.turns(benchmark, *both, peer_name="peer", budget=10.0, clock=clock.perf_counter)
    assert len(benchmark.stats.stats.data) == rounds
    assert benchmark.extra_info["ratio"] == pytest.approx(slowdown)


def test_where_benchmarks_are_disabled_both_still_run_once():
    clock, calls, benchmark = Clock(), [], FakeBenchmark(disabled=True)
    ours, peer = program(clock, 0.01, calls, "A"), program(clock, 0.01, calls, "B")
    turns.turns(benchmark, ours, peer, peer_name="peer", clock=clock.perf_counter)
    assert set(calls) == {"A", "B"}
    assert benchmark.extra_info == {}


def test_record_enters_what_was_measured_elsewhere():
    benchmark = FakeBenchmark()
    record(benchmark, [0.2, 0.4, 0.3], [0.1, 0.1, 0.1], "peer")
    assert benchmark.stats.stats.data == pytest.approx([0.2, 0.4, 0.3])
    assert benchmark.extra_info["ratio"] == pytest.approx(3.0)


def test_record_without_a_peer_compares_nothing():
    benchmark = FakeBenchmark()
    record(benchmark, [0.2])
    assert benchmark.extra_info == {}
    assert benchmark.stats.stats.data == pytest.approx([0.2])


def test_a_pause_before_each_turn_is_not_counted(monkeypatch):
    clock, benchmark, pauses = Clock(), FakeBenchmark(), []
    monkeypatch.setattr(
        turns.time, "sleep", lambda seconds: (pauses.append(seconds), program(clock, seconds)())
    )
    calls = []
    ours, peer = program(clock, 0.010, calls, "ours"), program(clock, 0.020)
    turns.turns(benchmark, ours, peer, peer_name="peer", rounds=3, pause=0.5, clock=clock.perf_counter)
    assert benchmark.extra_info["ratio"] == pytest.approx(0.5)
    assert benchmark.stats.stats.data == pytest.approx([0.010] * 3)
    assert pauses.count(0.5) == 6
    assert calls.count("ours") == 2 + 3 * 2  # two to see how long it takes; a turn has one uncounted


test_what_is_no_measurement_is_refused = refuses(
    lambda call: call(),
    (lambda: record(FakeBenchmark(timer=Clock().perf_counter), [0.2, 0.3]), RuntimeError, "compared"),
    (lambda: record(FakeBenchmark(), []), "at least one round"),
    (lambda: compare([1.0], [], "peer"), "equally many"),
    (lambda: compare([1.0], [1.0, 2.0], "peer"), "equally many"),
    (lambda: compare([], [], "peer"), "equally many"),
)


def test_quartiles():
    assert quartiles([3.0]) == (3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)


@compared("with the real fixture")
def test_with_pytest_benchmark_itself(benchmark):
    """Disabled in the tests, enabled by `minidist bench`; here that the real fixture takes our calls."""
    turns.turns(benchmark, lambda: None, lambda: None, peer_name="peer")
    assert benchmark.group == "with the real fixture"
