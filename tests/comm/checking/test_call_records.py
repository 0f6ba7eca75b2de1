"""Which calls contradict each other, and which are swapped: the rules, without processes."""

from __future__ import annotations

import re
from collections import deque

import pytest

from minidist.comm.checking import WINDOW
from minidist.comm.checking.call_records import Record, find_swap


def record(rank: int, stack: str, op: str = "sum", ordered: bool = True) -> Record:
    """A call with a frame for each letter, the innermost first: "a" and "A" are lines of one function."""
    frames = tuple(
        ("f.py", 10 * ord(name.lower()), 10 * ord(name.lower()) + name.isupper()) for name in stack
    )
    return Record(rank, "call", ("all_reduce", op), {}, frames, ordered)


def swapped(first: list[Record], second: list[Record]) -> str:
    rounds: deque[dict[int, Record]] = deque(maxlen=WINDOW)
    for one, other in zip(first, second, strict=True):
        found = find_swap(rounds, [one, other])
        if found:
            return found
        rounds.append({0: one, 1: other})
    return ""


@pytest.mark.parametrize(
    ("first", "second", "is_swap"),
    [
        ("ab", "ba", True),
        ("acb", "bca", True),
        ("abc", "bca", False),  # a circle of three
        ("xxab", "xxba", True),
        ("abab", "baba", True),
        ("aab", "aba", True),
        ("axb", "bya", True),
        ("xyz", "abc", False),
        ("aaa", "bbb", False),
        ("abcabc", "abcabc", False),
        ("ax", "ay", False),
        ("axb", "yab", False),  # a gap is no swap
        ("abcabc", "xabxab", False),
        ("aA", "Aa", False),  # two lines of one function
    ],
)
def test_a_swap_is_two_places_in_opposite_order(first: str, second: str, is_swap: bool) -> None:
    def found(ordered: bool) -> str:
        return swapped(
            [record(0, place, ordered=ordered) for place in first], [record(1, place) for place in second]
        )

    assert found(ordered=False) == ""
    text = found(ordered=True)
    assert bool(text) == is_swap
    if is_swap:
        one, then, other, late = re.findall(r"rank \d call at f.py:\d+|(?<=then )call at f.py:\d+", text)
        assert (one, other) == (f"rank 0 {late}", f"rank 1 {then}")


@pytest.mark.parametrize(
    ("first", "second", "is_swap"),
    [
        (("hg", "hl"), ("hl", "hg"), True),  # a helper h that functions g and l call
        (("hm", "hM"), ("hM", "hm"), False),  # which m calls from two lines, in turn
        (("gm", "lM"), ("lM", "gm"), False),  # m takes turns with functions
        (("gm", "lM"), ("lx", "gX"), True),  # each rank has a function that calls both
        (("gm", "lm"), ("lm", "gm"), True),  # one line of m calls what it is given
        (("hm", "hM"), ("hx", "hX"), False),  # nothing that both ranks do
    ],
)
def test_the_whole_stack_tells_places_apart(
    first: tuple[str, str], second: tuple[str, str], is_swap: bool
) -> None:
    found = swapped([record(0, stack) for stack in first], [record(1, stack) for stack in second])
    assert bool(found) == is_swap


def test_swaps_are_looked_for_in_the_latest_rounds_only() -> None:
    def rounds(pause: int) -> str:
        between = [record(0, "x")] * pause
        return swapped([record(0, "a"), *between, record(0, "b")], [record(1, "b"), *between, record(1, "a")])

    assert rounds(60)
    assert not rounds(70)


def test_calls_that_contradict_each_other() -> None:
    assert not record(1, "ab").contradicts(record(0, "c"))
    assert record(1, "ab").contradicts(record(0, "ab", "max"))
