"""Measure two programs in turns, A B A B, inside one benchmark, and compare their times.

A machine drifts: it warms up, a neighbour takes a core, a clock steps down. Two programs measured one after
the other differ by that drift as much as by their own speed. In turns, both rounds of a pair see the same
machine, so their ratio is reliable even if neither time is. The comparison goes into
`benchmark.extra_info`, and so into the results:

    peer, peer_median, peer_iqr    the other program's name, and the median and spread of its times in seconds
    ratio                          our time over the peer's, the median of the pairs: below 1 we are faster
    pair_ratio_q1, pair_ratio_q3   the quartiles of the pairs' ratios; if far apart, the ratio means little

Rounds end early where the difference is large: more of them would not change who is faster (`clear`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pytest
from _pytest.mark import ParameterSet

from minidist.benchmarks.harness import columns
from minidist.kernels.measure.timing_in_turns import LEAST, take_turns

TURN = 1e-3  # minimal seconds of a turn
CLEAR = 1.1
"""Rounds may end early only if all of the widened range is this factor away from 1; `FAR` before the fifth.

A rule that looks after each round, and stops once 1 is outside the range, would sooner or later call two
equal programs different. Near 1 a comparison gets all its rounds.
"""
FAR = 2.0
MOST_CALLS = 1000


class Benchmark(Protocol):
    """The part of pytest-benchmark's fixture that this file uses."""

    disabled: bool
    extra_info: dict[str, Any]
    group: str | None
    stats: Any

    def __call__(self, target: Callable[..., Any], *args: Any) -> Any:
        """Time target(*args), let pytest-benchmark choose the rounds, and return the target's result."""

    def pedantic(self, target: Callable[..., Any], *, rounds: int = 1) -> Any:
        """Time the target `rounds` times."""


def turns(
    benchmark: Benchmark,
    ours: Callable[[], object],
    peer: Callable[[], object],
    *,
    peer_name: str,
    rounds: int | None = None,
    budget: float = 1.0,
    pause: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Time two programs in turns; store ours as the benchmark's rounds and the peer as its comparison.

    A turn calls a program often enough to fill a millisecond, after one uncounted call. Otherwise a program
    of microseconds would run on caches that a longer one left cold, and the clock would be too coarse for it.
    Mark the calling benchmark with `compared(group)`.

    Args:
        benchmark: pytest-benchmark's fixture.
        ours, peer: the two programs; their results are dropped.
        peer_name: the peer's name in the report.
        rounds: pairs of turns; by default the number that fits into `budget` seconds, from 5 to 100, or
            fewer once the difference is `clear`.
        pause: seconds to sleep before each turn. A BLAS's threads keep spinning for 0.1 s after a product, on
            cores that the other program needs; a pause frees them. The program's own threads must then wake
            up, so with a pause there is always an uncounted call, and turns are ten times as long.
        clock: a function that returns seconds.
    """
    turn, early = 10 * TURN if pause else TURN, clear if rounds is None else None
    ours_calls, ours_s = _calls(ours, clock, turn)
    peer_calls, peer_s = _calls(peer, clock, turn)
    if rounds is None:
        rounds = max(5, min(100, int(budget / max(ours_s + peer_s + 2 * pause, 1e-9))))
    measured = measure_pair(
        lambda: _turn(ours, ours_calls, clock, pause),
        lambda: _turn(peer, peer_calls, clock, pause),
        rounds=1 if benchmark.disabled else rounds,
        warmup_rounds=0,
        early=early,
    )
    record(benchmark, *measured, peer_name)


def measure_pair(
    ours: Callable[[], float],
    peer: Callable[[], float],
    *,
    rounds: int,
    warmup_rounds: int = 1,
    early: Callable[[Sequence[float], Sequence[float]], bool] | None = None,
) -> tuple[list[float], list[float]]:
    """Call two programs that time themselves, in turns; return both's seconds, without the warm-up rounds.

    early: tells from the seconds so far whether to stop before `rounds`, as `clear` does.
    """
    for _ in range(warmup_rounds):
        ours(), peer()
    found = take_turns({"ours": ours, "peer": peer}, rounds, early=early)
    return found["ours"], found["peer"]


def clear(ours: Sequence[float], peer: Sequence[float]) -> bool:
    """Whether these rounds show a difference so large that more rounds would not change the verdict."""
    if len(ours) < LEAST:
        return False
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    low, high = columns.widened(*quartiles(ratios), len(ratios))
    factor = CLEAR if len(ours) >= columns.FEW else FAR
    return low > factor or high < 1 / factor


def record(
    benchmark: Benchmark, seconds: Sequence[float], peer_seconds: Sequence[float] = (), peer_name: str = ""
) -> None:
    """Store times that were measured in turns as this benchmark's rounds, and compare them with the peer's.

    `peer_seconds[i]` was measured right after `seconds[i]`; without a peer there is no comparison. Mark the
    calling benchmark with `compared(group)`. Raises ValueError if `seconds` is empty.
    """
    if not seconds:
        raise ValueError("seconds is empty: record at least one round")
    upcoming = iter(seconds)
    benchmark.pedantic(lambda: REPLAY.advance(next(upcoming)), rounds=len(seconds))
    if benchmark.disabled:
        return
    if abs(sum(benchmark.stats.stats.data) - sum(seconds)) > 1e-6 * sum(seconds):
        raise RuntimeError(
            "pytest-benchmark timed the replay itself: mark the benchmark with @compared(group)"
        )
    if peer_name:
        benchmark.extra_info.update(compare(seconds, peer_seconds, peer_name))


class Replay:
    """A clock that advances by recorded durations, to hand pytest-benchmark times that it can't take itself.

    pytest-benchmark times one program per benchmark, in its own process. It cannot take turns, and it cannot
    time a step of two ranks or the first import of a fresh process; only those processes can.
    """

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Return the sum of the durations so far, in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Advance the clock by one duration."""
        self._now += seconds


REPLAY = Replay()


def compared(group: str) -> pytest.MarkDecorator:
    """Mark a benchmark whose times come from `turns` or `record`; `group` is its table in the report."""
    return pytest.mark.benchmark(group=group, timer=REPLAY.now)


def case(*values: object, name: str | None = None, quick: bool = True) -> ParameterSet:
    """Return a benchmark's parameters, with an id; those that are not quick run with --full alone."""
    return pytest.param(*values, id=name, marks=[] if quick else [pytest.mark.full_only])


def _calls(program: Callable[[], object], clock: Callable[[], float], turn: float) -> tuple[int, float]:
    """Return how many calls fill a turn and the seconds of such a turn; this also warms the program up."""
    program()
    once = _turn(program, 1, clock)
    calls = max(1, min(MOST_CALLS, round(turn / once))) if once > 0 else MOST_CALLS
    return calls, once * (calls + (calls > 1))


def _turn(program: Callable[[], object], calls: int, clock: Callable[[], float], pause: float = 0.0) -> float:
    """Return the seconds of one of `calls` calls, with warm caches if a call is shorter than a turn."""
    time.sleep(pause)
    if calls > 1 or pause:
        program()
    start = clock()
    for _ in range(calls):
        program()
    return (clock() - start) / calls


def compare(ours: Sequence[float], peer: Sequence[float], peer_name: str) -> dict[str, Any]:
    """Return the figures of a comparison (see the top of this file) from both programs' seconds in pairs."""
    if len(ours) != len(peer) or not ours:
        raise ValueError(
            f"ours has {len(ours)} rounds and peer has {len(peer)}: pass equally many, at least one of each"
        )
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    q1, q3 = quartiles(ratios)
    peer_q1, peer_q3 = quartiles(peer)
    return {
        "peer": peer_name,
        "peer_median": statistics.median(peer),
        "peer_iqr": peer_q3 - peer_q1,
        "ratio": statistics.median(ratios),
        "pair_ratio_q1": q1,
        "pair_ratio_q3": q3,
    }


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and third quartile; for a single value, both are that value."""
    if len(values) == 1:
        return values[0], values[0]
    q1, _, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, q3
