"""Checks of lesson 8: shift, reduce-scatter, all-gather and all-reduce around a ring, and what they cost."""

from __future__ import annotations

import numpy as np
import torch

from checks.exercises import Answer, Lesson
from checks.ranks import Case, Run, on_ranks, says
from checks.verdicts import Right, Tally, compare

lesson = Lesson(8, "ranks_that_talk")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

RANKS = (2, 3, 4, 1)
TALK = ("send", "recv")


def cases_for(draw: np.random.Generator, ranks: int) -> list[Case]:
    """Each rank's own random tensor: none, one, ragged, even, and a larger one; the smallest first."""
    sizes = sorted({0, 1, ranks - 1, ranks, 2 * ranks + 1, int(draw.integers(12, 60))})
    return [
        Case(
            [(random_tensor(draw, size),) for _ in range(ranks)],
            f"{ranks} rank{'s' * (ranks > 1)} with tensors of length {size}",
        )
        for size in sizes
    ]


def random_tensor(draw: np.random.Generator, size: int) -> torch.Tensor:
    """Whole numbers, so that sums are exact in any order; none is 0."""
    return torch.from_numpy(draw.integers(1, 100, size).astype(np.float32))


def bounds_of(size: int, ranks: int) -> list[tuple[int, int]]:
    """Where each part of torch.tensor_split begins and ends."""
    ends = np.cumsum([len(part) for part in torch.empty(size).tensor_split(ranks)]).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


@lesson.exercise(
    "8.1",
    hints=(
        "Who is next is (md.rank() + 1) % md.size(); who is before is (md.rank() - 1) % md.size(). Draw "
        "three ranks on paper, and write beside each the line that it is at.",
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
        for run in on_ranks(answer, cases_for(draw, ranks), only=TALK):
            where = says(run.case)
            for rank in range(ranks):
                own, before = (run.case.args[each][0] for each in (rank, (rank - 1) % ranks))
                compare(run.results[rank], before, f"On {where}, rank {rank}'s result")
                compare(
                    run.args[rank][0], own, f"On {where}, rank {rank}'s own x, which should stay as it was,"
                )
                tally.add("Messages sent by a rank", run.messages(rank), min(1, ranks - 1))
                tally.add("Bytes sent by a rank", run.sent(rank), 4 * len(own) * min(1, ranks - 1))
            tried += 1
    return Right(tried, tally.scores)


@lesson.exercise(
    "8.2",
    hints=(
        "Call the parts 0 to n - 1. Part 2 has to end on rank 2, having been everywhere: so it starts on "
        "rank 3 and goes once around. Which part does rank r then send first, and which second?",
        "In step s (from 0 to n - 2) rank r sends part (r - 1 - s) % n to the next rank, and receives "
        "part (r - 2 - s) % n, which it adds to its own. What was received in one step is what is sent in"
        " the next.",
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
        for run in on_ranks(answer, cases_for(draw, ranks), only=TALK):
            total = sum(args[0] for args in run.case.args)
            for rank, (start, stop) in enumerate(bounds_of(len(total), ranks)):
                compare(
                    run.results[rank],
                    total[start:stop],
                    f"On {says(run.case)}, rank {rank}'s part of the sum",
                )
                _count(tally, run, rank, ranks - 1, len(total) - (stop - start))
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
        for run in on_ranks(answer, cases_for(draw, ranks), only=TALK):
            bounds = bounds_of(len(run.case.args[0][0]), ranks)
            whole = torch.cat([run.case.args[rank][0][a:b] for rank, (a, b) in enumerate(bounds)])
            for rank in range(ranks):
                _all_of(run, rank, whole)
                start, stop = bounds[(rank + 1) % ranks]  # the only part that it never passes on
                _count(tally, run, rank, ranks - 1, len(whole) - (stop - start))
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
        for run in on_ranks(answer, cases_for(draw, ranks), only=TALK):
            total = sum(args[0] for args in run.case.args)
            lengths = [stop - start for start, stop in bounds_of(len(total), ranks)]
            for rank in range(ranks):
                _all_of(run, rank, total)
                par = 2 * len(total) - lengths[rank] - lengths[(rank + 1) % ranks]
                _count(tally, run, rank, 2 * (ranks - 1), par)
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
    for ranks in (1, 2, 3, 4, 8, int(draw.integers(5, 500))):
        for size in (0, 4, int(draw.integers(1, 10**8))):
            alpha, beta = float(f"{draw.integers(1, 100)}e-6"), float(f"{draw.integers(1, 100)}e-11")
            for a, b in ((alpha, 0.0), (0.0, beta), (alpha, beta)):
                answer.expect(
                    2 * (ranks - 1) * (a + b * size / ranks), size, ranks, a, b, rtol=1e-9, atol=1e-15
                )
                tried += 1
    return Right(tried)


def _all_of(run: Run, rank: int, whole: torch.Tensor) -> None:
    """A rank returned the whole, and has it in its x."""
    compare(run.results[rank], whole, f"On {says(run.case)}, rank {rank}'s result")
    compare(run.args[rank][0], whole, f"On {says(run.case)}, rank {rank}'s x, which is filled in place,")


def _count(tally: Tally, run: Run, rank: int, messages: int, elements: int) -> None:
    """What a rank sent, against par: so many messages, and so many float32 elements in all of them."""
    tally.add("Messages sent by a rank", run.messages(rank), messages, "one message in each step")
    tally.add(
        "Bytes sent by a rank",
        run.sent(rank),
        4 * elements,
        "pass on one part in each step, never the whole tensor",
    )
