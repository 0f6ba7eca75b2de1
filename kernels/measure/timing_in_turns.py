"""Time functions in turns, A B A B, so that their times compare although the machine drifts.

Machines drift: clocks, temperature, neighbours. In turns a drift affects all functions alike, so the ratio of
two medians holds where separate timings would mislead.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

LEAST = 3  # rounds, however slow a machine is: their median is no outlier


def time_in_turns(
    functions: Mapping[str, Callable[[], object]], rounds: int | None, seconds: float = math.inf
) -> dict[str, list[float]]:
    """Call the functions in turns, `rounds` times each, and return the seconds of each call by name.

    After `seconds`, `LEAST` rounds suffice; with None for `rounds`, it takes as many as these seconds allow.

    Each function is called once before, untimed, for what happens only once: compiling, page faults, cold
    caches. A function that starts work elsewhere, on a GPU, has to wait for its end.
    """
    if rounds is not None and rounds < 1:
        raise ValueError(f"rounds is {rounds}: time at least one")
    for function in functions.values():
        function()
    timed = {name: functools.partial(_seconds_of, function) for name, function in functions.items()}
    return take_turns(timed, within(seconds, rounds))


def take_turns(
    timed: Mapping[str, Callable[[], float]],
    rounds: Iterable[int],
    early: Callable[..., bool] | None = None,
) -> dict[str, list[float]]:
    """Call functions that time themselves, in turns, once a round; return the seconds of each by name.

    early: looks at the seconds so far, a list for each function, and tells whether to stop before a round.
    """
    found: dict[str, list[float]] = {name: [] for name in timed}
    for _ in rounds:
        if early is not None and early(*found.values()):
            break
        for name, function in timed.items():
            found[name].append(function())
    return found


def within(seconds: float, rounds: int | None = None) -> Iterator[int]:
    """Yield the numbers of `rounds` rounds, or of fewer, `LEAST` or more, if `seconds` pass meanwhile."""
    end = time.perf_counter() + seconds
    for number in itertools.count() if rounds is None else range(rounds):
        if number >= LEAST and time.perf_counter() >= end:
            return
        yield number


def _seconds_of(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
