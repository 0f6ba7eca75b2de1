"""Two programs measured in turn, A B A B, inside one benchmark, and what their times say about each other.

A machine drifts: it warms up, a neighbour takes a core, a clock steps down. Two programs measured one after
the other differ by that drift as much as by their own speed. Measured in turn, every pair of rounds sees the
same machine, so their ratio holds where neither time does. What is compared goes into
`benchmark.extra_info`, and so into the results:

    peer, peer_median, peer_iqr    the other program's name, and the median and spread of its times in seconds
    ratio                          our time over the peer's, the median of the pairs: below 1 we are faster
    pair_ratio_q1, pair_ratio_q3   the middle half of the ratios of single pairs; far apart, it means little
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pytest

TURN = 1e-3  # seconds that a turn takes at least
MOST_CALLS = 1000


class Benchmark(Protocol):
    """What this file uses of pytest-benchmark's fixture."""

    disabled: bool
    extra_info: dict[str, Any]
    group: str | None
    stats: Any

    def __call__(self, target: Callable[..., Any], *args: Any) -> Any:
        """Time target(*args) in as many rounds as pytest-benchmark sees fit; return what it returned."""

    def pedantic(self, target: Callable[..., Any], *, rounds: int = 1) -> Any:
        """Time target, `rounds` times."""


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
    """Time two programs in turn and enter both: ours as the benchmark's rounds, the peer as its comparison.

    In a turn a program is called as often as fills a millisecond, and once before, uncounted: a program of
    microseconds that had to run right after a long one would be timed with cold caches, and by a clock that
    is too coarse for it. The function that uses this is marked with `compared(group)`.

    Args:
        benchmark: pytest-benchmark's fixture.
        ours, peer: the two programs; what they return is dropped.
        peer_name: what the report calls the peer.
        rounds: pairs of turns; by default as many, from 5 to 100, as fit into `budget` seconds.
        pause: seconds to sleep before each turn. The threads of a BLAS go on spinning for 0.1 s after a
            product, on the cores that the other program is to use: with a pause each finds them free. Its own
            threads then have to wake up, hence an uncounted call first, and turns of ten times the length.
        clock: a function that returns seconds.
    """
    turn = 10 * TURN if pause else TURN
    ours_calls, ours_s = _calls(ours, clock, turn)
    peer_calls, peer_s = _calls(peer, clock, turn)
    if rounds is None:
        rounds = max(5, min(100, int(budget / max(ours_s + peer_s + 2 * pause, 1e-9))))
    measured = measure_turns(
        lambda: _turn(ours, ours_calls, clock, pause),
        lambda: _turn(peer, peer_calls, clock, pause),
        rounds=1 if benchmark.disabled else rounds,
        warmup_rounds=0,
    )
    record(benchmark, *measured, peer_name)


def measure_turns(
    ours: Callable[[], float], peer: Callable[[], float], *, rounds: int, warmup_rounds: int = 1
) -> tuple[list[float], list[float]]:
    """Call two programs that measure themselves in turn; return the seconds of both, less the warm-up's."""
    pairs = [(ours(), peer()) for _ in range(warmup_rounds + rounds)][warmup_rounds:]
    return [ours_s for ours_s, _ in pairs], [peer_s for _, peer_s in pairs]


def record(
    benchmark: Benchmark, seconds: Sequence[float], peer_seconds: Sequence[float] = (), peer_name: str = ""
) -> None:
    """Enter times that were measured in turn as this benchmark's rounds, and compare them with the peer's.

    `peer_seconds[i]` was measured next to `seconds[i]`; without a peer there is no comparison. The function
    that uses this is marked with `compared(group)`. Raises ValueError for no rounds.
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
    """A clock that moves by recorded durations, and so hands times to pytest-benchmark that it can't take.

    It knows one program a benchmark, and no turns; and a step of two ranks, or the end of a fresh process's
    first import, only those can time.
    """

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds since this clock was made: the sum of what it played."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Play one duration."""
        self._now += seconds


REPLAY = Replay()


def compared(group: str) -> pytest.MarkDecorator:
    """Mark a benchmark whose times come from `turns` or `record`; `group` is its table in the report."""
    return pytest.mark.benchmark(group=group, timer=REPLAY.now)


def _calls(program: Callable[[], object], clock: Callable[[], float], turn: float) -> tuple[int, float]:
    """How many calls fill a turn, and the seconds of such a turn; this warms the program up, too."""
    program()
    once = _turn(program, 1, clock)
    calls = max(1, min(MOST_CALLS, round(turn / once))) if once > 0 else MOST_CALLS
    return calls, once * (calls + (calls > 1))


def _turn(program: Callable[[], object], calls: int, clock: Callable[[], float], pause: float = 0.0) -> float:
    """Seconds of one call, from `calls` of them, with warm caches where a call takes less than a turn."""
    time.sleep(pause)
    if calls > 1 or pause:
        program()
    start = clock()
    for _ in range(calls):
        program()
    return (clock() - start) / calls


def compare(ours: Sequence[float], peer: Sequence[float], peer_name: str) -> dict[str, Any]:
    """The figures of a comparison (see the top of this file) from both programs' seconds, pair by pair."""
    if len(ours) != len(peer) or not ours:
        raise ValueError(
            f"ours has {len(ours)} rounds and peer has {len(peer)}: turns come in pairs, at least one"
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
    """The first and the third quartile; both the value itself where there is one."""
    if len(values) == 1:
        return values[0], values[0]
    q1, _, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, q3
