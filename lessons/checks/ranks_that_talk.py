"""Checks of lesson 8: shift, reduce-scatter, all-gather and all-reduce around a ring, and what they cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from checks.ranks import Run, says
from checks.settings import driven
from checks.support.contributions import (
    bounds_of,
    cases_for,
    of_whole,
    story_of_one,
    story_of_part,
    story_of_whole,
)
from checks.support.exercises import Answer, Lesson
from checks.support.rounds import in_order, rounds_of
from checks.support.verdicts import Right, Tally, compare, wrong

lesson = Lesson(8, "ranks_that_talk")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

RANKS = (4, 2, 3, 1)
TALK = ("send", "recv")


@lesson.exercise(
    "8.1",
    hints=(
        "The next rank is (md.rank() + 1) % md.size(), and the rank before is (md.rank() - 1) % md.size(). "
        "Draw three ranks on paper, and write beside each the line that it is at.",
        "If every rank first sends and then receives, each waits for a neighbour that is not listening: a"
        " send ends only once the other side receives. One of the two has to begin without waiting.",
        "work = comm.send(x, after, async_op=True) begins and returns at once. Then comm.recv(arrived, "
        "before) into arrived = torch.empty_like(x), then work.wait(), and return arrived. A rank that is"
        " alone returns x.clone().",
    ),
)
def shift(answer: Answer, draw: np.random.Generator) -> Right:
    """Every rank gives its tensor to the next and returns that of the rank before."""
    tally, tried = Tally(), 0
    for ranks in RANKS:
        for run in driven(answer, in_order, cases_for(draw, ranks), only=TALK):
            where = says(run.case)
            for rank in range(ranks):
                own, before = (run.case.args[each][0] for each in (rank, (rank - 1) % ranks))
                got, is_x, _ = run.results[rank]
                what = f"On {where}, rank {rank}'s result"
                compare(got, before, what, story=of_whole(story_of_one(run)))
                compare(
                    run.args[rank][0], own, f"On {where}, rank {rank}'s own x, which should stay as it was,"
                )
                if is_x:
                    wrong(f"{what} is x itself, and should be a new tensor: x.clone().")
                tally.add("Messages sent by a rank", run.messages(rank), min(1, ranks - 1))
                tally.add("Bytes sent by a rank", run.sent(rank), 4 * len(own) * min(1, ranks - 1))
            _at_the_same_time(tally, run, min(1, ranks - 1))
            tried += 1
    return Right(tried, tally.scores)


@lesson.exercise(
    "8.2",
    hints=(
        "Call the parts 0 to n - 1. Part 2 has to end on rank 2, having been everywhere: so it starts on "
        "rank 3 and goes once around. Which part does rank r then send first, and which second?",
        "In step s (from 0 to n - 2) rank r sends part (r - 1 - s) % n to the next rank, and receives part "
        "(r - 2 - s) % n, which it adds to its own. It sends the sum in the next step.",
        "parts = x.tensor_split(n), then for s in range(n - 1): parts[(r - 2 - s) % n].add_(shift...) "
        "does not quite do, since parts may differ in length: receive into torch.empty_like(parts[(r - 2 "
        "- s) % n]) with send(..., async_op=True), recv and wait as in shift. Return parts[r]. The parts "
        "are views of x: what you add to them is in x.",
    ),
)
def ring_reduce_scatter(answer: Answer, draw: np.random.Generator) -> Right:
    """Part r of the sum of all ranks' tensors ends on rank r."""
    tally, tried = Tally(), 0
    for ranks in RANKS:
        for run in driven(answer, in_order, cases_for(draw, ranks, by_part=True), only=TALK):
            total = sum(args[0] for args in run.case.args)
            for rank, (start, stop) in enumerate(bounds_of(len(total), ranks)):
                what = f"On {says(run.case)}, rank {rank}'s part of the sum"
                compare(
                    run.results[rank][0], total[start:stop], what, story=of_whole(story_of_part(run, rank))
                )
            _in_a_ring(run)
            for rank, (start, stop) in enumerate(bounds_of(len(total), ranks)):
                _count(tally, run, rank, ranks - 1, len(total) - (stop - start))
            _at_the_same_time(tally, run, ranks - 1)
            tried += 1
    return Right(tried, tally.scores)


@lesson.exercise(
    "8.3",
    hints=(
        "Nothing is added any more: a part that arrives is stored where it belongs, and passed on in the "
        "next step. Rank r begins with the only part that it has complete.",
        "In step s rank r sends part (r - s) % n and receives part (r - 1 - s) % n.",
        "As in the reduce-scatter, but receive straight into parts[(r - 1 - s) % n]: a part is a view of "
        "x, so comm.recv writes into x, and no other tensor is needed. Return x.",
    ),
)
def ring_all_gather(answer: Answer, draw: np.random.Generator) -> Right:
    """Rank r has part r; all end with all parts."""
    tally, tried = Tally(), 0
    for ranks in RANKS:
        for run in driven(answer, in_order, cases_for(draw, ranks), only=TALK):
            bounds = bounds_of(len(run.case.args[0][0]), ranks)
            whole = torch.cat([run.case.args[rank][0][a:b] for rank, (a, b) in enumerate(bounds)])
            for rank in range(ranks):
                _all_of(run, rank, whole, story_of_one(run))
            _in_a_ring(run)
            for rank in range(ranks):
                start, stop = bounds[_next(run, rank)]  # the only part that it never passes on
                _count(tally, run, rank, ranks - 1, len(whole) - (stop - start))
            _at_the_same_time(tally, run, ranks - 1)
            tried += 1
    return Right(tried, tally.scores)


@lesson.exercise(
    "8.4",
    hints=(
        "You have written all of it already.",
        "After the reduce-scatter rank r has part r of the sum, in x. What does the all-gather ask for?",
        "Two lines: ring_reduce_scatter(x), then return ring_all_gather(x).",
    ),
)
def ring_all_reduce(answer: Answer, draw: np.random.Generator) -> Right:
    """Every rank ends with the sum of all ranks' tensors."""
    tally, tried = Tally(), 0
    for ranks in RANKS:
        for run in driven(answer, in_order, cases_for(draw, ranks, by_part=True), only=TALK):
            total = sum(args[0] for args in run.case.args)
            bounds = bounds_of(len(total), ranks)
            for rank in range(ranks):
                _all_of(run, rank, total, story_of_whole(run, bounds))
            _in_a_ring(run)
            lengths = [stop - start for start, stop in bounds]
            for rank in range(ranks):
                par = 2 * len(total) - lengths[rank] - lengths[_next(run, rank)]
                _count(tally, run, rank, 2 * (ranks - 1), par)
            _at_the_same_time(tally, run, 2 * (ranks - 1))
            tried += 1
    return Right(tried, tally.scores)


@lesson.exercise(
    "8.5",
    hints=(
        "One message of b bytes takes alpha + beta b seconds. How many messages does a rank send one "
        "after the other, and how long is each?",
        "2 (n - 1) messages, each of size / n bytes.",
        "return 2 * (ranks - 1) * (alpha + beta * size / ranks)",
    ),
)
def ring_seconds(answer: Answer, draw: np.random.Generator) -> Right:
    """Predict the time of a ring all-reduce from alpha and beta."""
    tried = 0
    for ranks in (4, 1, 2, 3, 8, int(draw.integers(5, 500))):
        for size in (0, 4, int(draw.integers(1, 10**8))):
            alpha, beta = float(f"{draw.integers(1, 100)}e-6"), float(f"{draw.integers(1, 100)}e-11")
            for a, b in ((alpha, 0.0), (0.0, beta), (alpha, beta)):
                right = 2 * (ranks - 1) * (a + b * size / ranks)
                wrongs = {
                    "That sends the whole tensor in each message.": 2 * (ranks - 1) * (a + b * size),
                    "That counts alpha once, and each message takes it.": a
                    + 2 * (ranks - 1) * b * size / ranks,
                }
                answer.expect(right, size, ranks, a, b, rtol=1e-9, atol=1e-15, wrongs=wrongs)
                tried += 1
    return Right(tried)


def _all_of(run: Run, rank: int, whole: torch.Tensor, story: Callable[[int, int], str]) -> None:
    """A rank returned the whole, and has it in its x."""
    where = f"On {says(run.case)}, rank {rank}'s"
    compare(run.results[rank][0], whole, f"{where} result", story=of_whole(story))
    before = run.case.args[rank][0]
    compare(run.args[rank][0], whole, f"{where} x, which is filled in place,", before=before)


def _receivers(run: Run, rank: int) -> list[int]:
    return sorted({peer for kind, peer in run.results[rank][2] if kind == "send"})


def _next(run: Run, rank: int) -> int:
    """The rank that it sends to: a ring may turn either way."""
    return next(iter(_receivers(run, rank)), (rank + 1) % len(run.results))


def _in_a_ring(run: Run) -> None:
    """WrongAnswer where a rank sends to several others."""
    for rank in range(len(run.results)):
        receivers = _receivers(run, rank)
        if len(receivers) > 1:
            wrong(
                f"On {says(run.case)}, the result is right, but rank {rank} sends to ranks "
                f"{', '.join(map(str, receivers[:-1]))} and {receivers[-1]}, and this is no ring.",
                "  In a ring each rank sends to its neighbour alone, and passes on in each step what arrived "
                "in the step before.",
            )


def _at_the_same_time(tally: Tally, run: Run, par: int) -> None:
    """Rounds of messages, against par: a rank that listens first makes the next one wait for it."""
    tally.add(
        "Rounds of messages, one after the other",
        rounds_of([events for _, _, events in run.results]),
        par,
        "begin your message (async_op=True) before you wait for the other one, so that all ranks send at the "
        "same time",
    )


def _count(tally: Tally, run: Run, rank: int, messages: int, elements: int) -> None:
    """What a rank sent, against par: so many messages, and so many float32 elements in all of them."""
    size, ranks = len(run.case.args[rank][0]), len(run.results)
    largest = max((int(np.prod(call.shape)) for call in run.calls[rank] if call.name == "send"), default=0)
    whole = largest > -(-size // ranks)
    idea = "pass on one part in each step, never the whole tensor" if whole else "each part goes around once"
    tally.add("Messages sent by a rank", run.messages(rank), messages, "one message in each step")
    tally.add("Bytes sent by a rank", run.sent(rank), 4 * elements, idea)
