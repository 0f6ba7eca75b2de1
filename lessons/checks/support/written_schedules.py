"""Schedules as a reader writes them: check their form, then simulate them (for `cutting_the_model`)."""

from __future__ import annotations

import numpy as np

from checks.support.answers import Answer
from checks.support.verdicts import not_none, wrong
from checks.support.words import described
from minidist.parallel import schedules
from minidist.parallel.schedules import Instruction, Simulation

SIZES = ((1, 1), (1, 3), (2, 1), (2, 2), (2, 5), (3, 1), (3, 2), (3, 4), (4, 2), (4, 3), (4, 4), (4, 8))
"""Ranks and micro-batches of the schedules that are tried."""


def sizes(draw: np.random.Generator) -> list[tuple[int, int]]:
    """Ranks and micro-batches to try, the smallest first."""
    return [*SIZES, (int(draw.integers(2, 7)), int(draw.integers(1, 13)))]


def schedule_of(
    answer: Answer, ranks: int, micro_batches: int, kinds: tuple[str, ...]
) -> tuple[list[list[Instruction]], str]:
    """What it gives, after a look at its form; and how it was called."""
    call = f"{answer.name}({ranks}, {micro_batches})"
    got = answer(ranks, micro_batches)
    not_none(got, call)
    if not isinstance(got, list) or not all(isinstance(own, list) for own in got):
        wrong(f"{call} should be a list with a list of instructions for each rank; it is {described(got)}.")
    if len(got) != ranks:
        wrong(f"{call} has {len(got)} lists, and should have {ranks}, one for each rank.")
    for rank, own in enumerate(got):
        for each in own:
            if not isinstance(each, Instruction):
                wrong(f"{call}: rank {rank}'s list has {described(each)}, which is no Instruction.")
            if each.kind not in kinds:
                takes = ", ".join(kinds)
                wrong(f"{call}: rank {rank} has the kind {each.kind!r}; this exercise takes {takes}.")
            if each.micro_batch >= micro_batches or each.chunk:
                wrong(
                    f"{call}: rank {rank} has {each}; micro-batches are 0 to {micro_batches - 1}, and there "
                    "is one chunk."
                )
    return got, call


def simulated(schedule: list[list[Instruction]], call: str, micro_batches: int) -> Simulation:
    """The simulation of a schedule that ranks can execute."""
    fault = ""
    try:
        whole = schedules.with_messages(schedule)
        schedules.check(whole, micro_batches)
    except ValueError as error:
        fault = str(error)
    if fault:
        wrong(f"{call}: {fault}.")
    return schedules.simulate(whole)


def listed(own: list[Instruction]) -> str:
    """The beginning of a rank's list, for a message."""
    return " ".join(map(str, own[:10])) + (" ..." if len(own) > 10 else "")
