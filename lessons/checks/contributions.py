"""Tensors whose digits say which rank contributed, so that a message can name the rank that is missing.

Rank 0 has ones, rank 1 tens, rank 2 hundreds, rank 3 thousands: in 1101 rank 1's part is missing, and in 1121
it is there twice. A check of lesson 8 tries them first, and random tensors after that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from checks.ranks import Case, Run
from checks.verdicts import WrongAnswer, compare, wrong
from checks.words import as_array, plural

TYPICAL = "4 ranks with 8 numbers each (all 1 on rank 0, 10 on rank 1, 100 on rank 2, 1000 on rank 3)"
BY_PART = "4 ranks (rank 0 has 1 1 2 2 3 3 4 4, ranks 1, 2 and 3 have 10, 100 and 1000 times that)"


def cases_for(draw: np.random.Generator, ranks: int, by_part: bool = False) -> list[Case]:
    """Each rank's own tensor; on 4 ranks first one whose digits say who contributed, then random ones.

    by_part: whether the numbers of that first one differ from part to part.
    """
    sizes = sorted({0, 1, ranks - 1, ranks, 2 * ranks + 1, int(draw.integers(12, 60))})
    cases = [
        Case(
            [(random_tensor(draw, size),) for _ in range(ranks)],
            f"{plural(ranks, 'rank')} with tensors of length {size}",
        )
        for size in sizes
    ]
    if ranks == 4:
        ones = torch.arange(1.0, 5.0).repeat_interleave(2) if by_part else torch.ones(8)
        text = BY_PART if by_part else TYPICAL
        cases.insert(0, Case([(ones * 10**rank,) for rank in range(4)], text))
    return cases


def random_tensor(draw: np.random.Generator, size: int) -> torch.Tensor:
    """Whole numbers, so that sums are exact in any order; none is 0."""
    return torch.from_numpy(draw.integers(1, 100, size).astype(np.float32))


def bounds_of(size: int, ranks: int) -> list[tuple[int, int]]:
    """Where each part of torch.tensor_split begins and ends."""
    ends = np.cumsum([len(part) for part in torch.empty(size).tensor_split(ranks)]).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def told(got: Any, right: torch.Tensor, what: str, story: Callable[[int, int], str]) -> None:
    """`compare`; of the first wrong element the story says, from its place and value, where it comes from."""
    try:
        compare(got, right, what)
    except WrongAnswer as error:
        text = ""
        if isinstance(got, torch.Tensor) and got.shape == right.shape:
            at = int(np.argmax(as_array(got) != as_array(right)))
            if float(got[at]).is_integer() and 0 <= got[at] < 10**4:
                text = story(at, int(got[at]))
        wrong(*([str(error), f"  {text}"] if text else [str(error)]))


def whose(value: int) -> str:
    """In the typical case of 8.1 and 8.3, return the rank that has this number."""
    return f"{value} is rank {len(str(value)) - 1}'s number." if value in (1, 10, 100, 1000) else ""


def _contributions(part: int, value: int) -> str:
    """In the typical case, return the ranks that a sum lacks or counts twice."""
    digits = [value // 10**rank % 10 for rank in range(4)]
    if len(set(digits)) == 1 and 0 < digits[0] <= 4:
        return f"{value} is the sum of part {digits[0] - 1}, and this is part {part}."
    times = [digit / (part + 1) for digit in digits]
    if not set(times) <= {0, 1, 2}:
        return ""
    found = []
    for count, how in ((0, "missing"), (2, "in it twice")):
        ranks = [rank for rank in range(4) if times[rank] == count]
        if ranks:
            found.append(f"{_parts_of(ranks)} {how}")
    return f"In {value} {', and '.join(found)}."


def _parts_of(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}'s part is"
    return f"the parts of ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} are"


def is_typical(run: Run) -> bool:
    """True for the case whose digits say who contributed."""
    return run.case.says in (BY_PART, TYPICAL)


def story_of_part(run: Run, part: int) -> Callable[[int, int], str]:
    """For `told`: where a wrong element of this part of the sum comes from."""
    return lambda _, value: _contributions(part, value) if is_typical(run) else ""


def story_of_whole(run: Run, bounds: Sequence[tuple[int, int]]) -> Callable[[int, int], str]:
    """The same for a tensor whose parts lie within these bounds."""

    def story(at: int, value: int) -> str:
        part = next(part for part, (start, stop) in enumerate(bounds) if start <= at < stop)
        return _contributions(part, value) if is_typical(run) else ""

    return story
