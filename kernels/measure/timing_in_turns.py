"""Time functions in turns, A B A B: a drift of the machine (clocks, neighbours) then affects all alike.

So the ratio of two medians holds where separate timings would mislead.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping

LEAST = 3  # rounds, however slow a machine is: their median is no outlier


def time_in_turns(
    functions: Mapping[str, Callable[[], object]], rounds: int | None, seconds: float = math.inf
) -> dict[str, list[float]]:
    """Time functions as `take_turns` does, after a first call of each, whose time is dropped.

    That call is for what happens only once: compiling, page faults, cold caches. A function that starts work
    on a GPU has to wait for its end.
    """
    if rounds is not None and rounds < 1:
        raise ValueError(f"rounds is {rounds}: time at least one")
    timed = {name: functools.partial(_seconds_of, function) for name, function in functions.items()}
    take_turns(timed, 1)
    return take_turns(timed, rounds, seconds)


def take_turns(
    timed: Mapping[str, Callable[[], float]],
    rounds: int | None,
    seconds: float = math.inf,
    early: Callable[..., bool] | None = None,
) -> dict[str, list[float]]:
    """Call functions that time themselves, in turns, `rounds` times each; return their seconds by name.

    After `seconds`, `LEAST` rounds suffice; with None for `rounds`, it takes as many as these seconds allow.
    early: tells from the seconds so far, a list of each function's, whether to stop before a round.
    """
    found: dict[str, list[float]] = {name: [] for name in timed}
    end = time.perf_counter() + seconds
    for number in itertools.count() if rounds is None else range(rounds):
        if (number >= LEAST and time.perf_counter() >= end) or (early and early(*found.values())):
            break
        for name, function in timed.items():
            found[name].append(function())
    return found


def _seconds_of(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
