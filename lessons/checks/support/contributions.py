"""Tensors whose digits say which rank contributed, so that a message can name the rank that is missing.

Rank 0 has ones, rank 1 tens, rank 2 hundreds, rank 3 thousands: in 1101 rank 1's part is missing, and in 1121
it is there twice. The checks of lessons 8, 9, 10 and 13 try them first, and random tensors after that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from checks.ranks import Case, Run
from checks.support.diagnosis import Story
from checks.support.words import plural

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


def of_whole(story: Callable[[int, int], str]) -> Story:
    """For `compare`: what the story says of the first wrong element's place and value, a whole number."""

    def told(got: np.ndarray, first: tuple[int, ...]) -> str:
        value = float(got[first])
        whole = abs(value - round(value)) < 1e-9 * max(1, abs(value)) and 0 <= round(value) < 10**4
        return story(first[0] if first else 0, round(value)) if whole else ""

    return told


def whose_parts(ranks: int) -> Story:
    """For `compare`, where the right value is a sum of 1 on rank 0, 10 on rank 1, 100 on rank 2 ..."""
    return of_whole(lambda _, value: _parts_in(value, ranks))


def _contributions(part: int, value: int) -> str:
    """In the typical case, return the ranks that a sum lacks or counts twice."""
    digits = {value // 10**rank % 10 for rank in range(4)}
    if len(digits) == 1 and 0 < min(digits) <= 4:
        return f"{value} is the sum of part {min(digits) - 1}, and this is part {part}."
    return _parts_in(value, 4, part + 1)


def _parts_in(value: int, ranks: int, each: int = 1) -> str:
    """Whose part is missing in a sum, and whose is in it several times; each rank's digit is to be `each`."""
    digits = [value // 10**rank % 10 for rank in range(ranks)]
    if value >= 10**ranks or any(digit % each for digit in digits) or len({*digits}) == 1:
        return ""
    found = []
    for count in sorted({digit // each for digit in digits} - {1}):
        how = {0: "missing", 2: "in it twice"}.get(count, f"in it {count} times")
        found.append(f"{_parts_of([r for r in range(ranks) if digits[r] == count * each])} {how}")
    return f"In {value} {', and '.join(found)}."


def _parts_of(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}'s part is"
    return f"the parts of ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} are"


def is_typical(run: Run) -> bool:
    """True for the case whose digits say who contributed."""
    return run.case.says in (BY_PART, TYPICAL)


class Tidy(nn.Module):
    """Two parameters, each of whose gradients is half of the mean of the inputs, with targets of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores of two classes, both 0 at first, so that each is as likely as the other."""
        second = inputs[:, 0] * (self.weight.sum() + self.bias.sum())
        return torch.stack([torch.zeros_like(second), second], dim=1)


def tidy_rows(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One row for `Tidy`: its part of the ranks' mean gradient is 1 on rank 0, 10 on rank 1 ..."""
    x = torch.full((1, 1), 2.0 * ranks * 10**rank, dtype=torch.float64)
    return x, torch.zeros(1, dtype=torch.long)


def tens(ranks: int, each: int = 1) -> str:
    """Of two ranks "1 on rank 0, 10 on rank 1"."""
    return ", ".join(f"{each * 10**rank} on rank {rank}" for rank in range(ranks))


def story_of_one(run: Run) -> Callable[[int, int], str]:
    """For `of_whole`, in the typical case of 8.1 and 8.3: the rank that has this number."""
    known = (1, 10, 100, 1000) if is_typical(run) else ()
    return lambda _, value: f"{value} is rank {known.index(value)}'s number." if value in known else ""


def story_of_part(run: Run, part: int) -> Callable[[int, int], str]:
    """For `of_whole`: where a wrong element of this part of the sum comes from."""
    return lambda _, value: _contributions(part, value) if is_typical(run) else ""


def story_of_whole(run: Run, bounds: Sequence[tuple[int, int]]) -> Callable[[int, int], str]:
    """The same for a tensor whose parts lie within these bounds."""

    def story(at: int, value: int) -> str:
        part = next(part for part, (start, stop) in enumerate(bounds) if start <= at < stop)
        return _contributions(part, value) if is_typical(run) else ""

    return story
