"""Checks of the arguments of `Cluster`: an error names the argument, its value, the remedy."""

from __future__ import annotations

from collections.abc import Iterable

from minidist._arguments import is_number, is_whole

LONGEST_TIMEOUT = 1e6
"""Seconds. Beyond this the clocks of the libraries below soon overflow."""


def check_ranks(name: str, value: Iterable[int], ranks: int) -> frozenset[int]:
    """The ranks that `value` names; an error where it names no ranks of these."""
    given = tuple(value) if isinstance(value, Iterable) else value
    if not isinstance(given, tuple) or not all(map(is_whole, given)):
        raise TypeError(f"{name} is {given!r}; give ranks, such as (1, 2)")
    if not set(given) <= set(range(ranks)):
        raise ValueError(f"{name} is {given}; the ranks are 0 to {ranks - 1}: give some of them")
    return frozenset(given)


def check_seconds(name: str, value: float) -> float:
    """`value` as a float; an error where it is no time to wait."""
    if not is_number(value):
        raise TypeError(f"{name} is {value!r}; give a number of seconds")
    if not 0 < value <= LONGEST_TIMEOUT:
        none = ", or None for no limit" if name == "timeout" else ""
        raise ValueError(f"{name} is {value}; give seconds above 0 and up to {LONGEST_TIMEOUT:.0f}{none}")
    return float(value)
