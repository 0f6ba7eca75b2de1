"""Checks of lesson 9: gradients averaged over ranks, and weighed by rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from checks.ranks import Case, Run, says
from checks.settings import driven
from checks.support.contributions import Tidy, tens, tidy_rows, whose_parts
from checks.support.exercises import Answer, Lesson
from checks.support.verdicts import Right, Tally, compare, wrong
from checks.support.words import plural
from minidist.model import MLP

lesson = Lesson(9, "data_parallel")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

RANKS = (2, 3, 4, 1)
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
"""Float64 has 16 digits; sums in another order cost few of them, and a wrong weight costs nearly all."""

Rows = tuple[Tensor, Tensor]  # inputs (rows, sizes[0]), targets (rows,)


TIDY: Sequence[int] = ()
"""In place of sizes: the network whose gradients are 1, 10, 100, ... on the ranks."""


def network(sizes: Sequence[int], frozen: int | None = None) -> nn.Module:
    """The same on all ranks; one of its parameters may be frozen."""
    if sizes == TIDY:
        return Tidy()
    model = MLP(sizes, seed=9, dtype=torch.float64)
    if frozen is not None:
        list(model.parameters())[frozen].requires_grad = False
    return model


def draw_sizes(draw: np.random.Generator) -> tuple[int, ...]:
    """Of a network with one, two or three layers."""
    return tuple(int(size) for size in draw.integers(2, 6, draw.integers(2, 5)))


def draw_rows(draw: np.random.Generator, sizes: Sequence[int], rows: int) -> Rows:
    """Random inputs, and a class for each."""
    inputs = torch.from_numpy(draw.standard_normal((rows, sizes[0])))
    return inputs, torch.from_numpy(draw.integers(0, sizes[-1], rows))


def gradients(model: nn.Module) -> list[Tensor | None]:
    """Copies of a model's gradients, in the order of its parameters."""
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def right_gradients(sizes: Sequence[int], rows: Sequence[Rows]) -> list[Tensor | None]:
    """Those of the mean loss over all rows, in one process."""
    model = network(sizes)
    inputs, targets = (torch.cat([pair[i] for pair in rows]) for i in (0, 1))
    functional.cross_entropy(model(inputs), targets).backward()
    return gradients(model)


def tidy_case(ranks: int, text: str, arguments: Callable[[Rows], tuple[Any, ...]]) -> Case:
    """A case with `Tidy` and one row on each rank, of which `arguments` makes all but the sizes."""
    args = [(TIDY, *arguments(tidy_rows(rank, ranks))) for rank in range(ranks)]
    return Case(args, f"{plural(ranks, 'rank')} with {text}")


def tidy_gradients(ranks: int) -> str:
    """What the gradients of `tidy_case` are on each rank, in words."""
    return f"gradients of {tens(ranks, ranks)}"


def tidy_row(ranks: int) -> str:
    """The same, for their part in the gradient of all rows."""
    return f"a row each, which adds to the gradient {tens(ranks)}"


def compare_gradients(
    run: Run,
    got: Sequence[Any],
    right: Sequence[Any],
    rank: int,
    more: str = "",
    suspects: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """WrongAnswer where one of a rank's gradients is not the right one; names its parameter.

    `suspects` are gradients that wrong answers give, each by the sentence that says what they are.
    """
    sizes, ranks = run.case.args[0][0], len(run.results)
    names = [name for name, _ in network(sizes).named_parameters()]
    others = whose_parts(ranks) if sizes == TIDY else None
    for place, (name, mine, expected) in enumerate(zip(names, got, right, strict=True)):
        what = f"On {says(run.case)}, rank {rank}'s gradient of {name}{more}"
        if expected is None and mine is None:
            continue
        if expected is None:
            wrong(f"{what} should stay None: the parameter is frozen.")
        if mine is None:
            wrong(f"{what} is None: was there a backward pass?")
        wrongs = {sentence: every[place] for sentence, every in (suspects or {}).items()}
        compare(mine, expected, what, **CLOSE, story=others, wrongs=wrongs)


def of_means(sizes: Sequence[int], rows: Sequence[Rows], whose: str = "ranks") -> dict[str, Sequence[Any]]:
    """Suspects: gradients of means over each one's own rows, put together without their numbers of rows."""
    means = [right_gradients(sizes, [own]) for own in rows if len(own[0])]
    sums = [sum(same) for same in zip(*means, strict=True)]  # type: ignore[arg-type]
    return {
        f"That is the mean of the {whose}' means: where there are few rows, each counts more.": [
            each / len(rows) for each in sums
        ],
        f"That is the sum of the {whose}' means: divide by the rows of all ranks.": sums,
    }


def count(tally: Tally, run: Run, rank: int, lengths: Sequence[int]) -> None:
    """All-reduces of a rank, and the bytes in them, against one of each of these lengths, in float64."""
    ranks = len(run.calls)
    calls = sum(call.name in ("all_reduce", "all_gather", "broadcast") for call in run.calls[rank])
    tally.add(
        "All-reduces by each rank", calls, len(lengths), "one for each parameter, and no more than that"
    )
    par = 2 * (ranks - 1) * 8 * sum(lengths) // ranks  # of all together: each alone is rounded down
    tally.add("Bytes sent by each rank", run.sent(rank), par, "an all-reduce of each, once, and no gather")


def lengths_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """Elements of each, of those that are there."""
    return [tensor.numel() for tensor in tensors if tensor is not None]


def _average(function: Callable[..., Any], sizes: Sequence[int], frozen: int | None, rows: Rows) -> Any:
    """On a rank: backward on its own rows, then the reader's function."""
    model = network(sizes, frozen)
    functional.cross_entropy(model(rows[0]), rows[1]).backward()
    own = gradients(model)
    function(model)
    return own, gradients(model)


@lesson.exercise(
    "9.1",
    hints=(
        "A mean is a sum, divided by how many there are. Which operation of lesson 8 gives every rank the "
        "sum?",
        "comm.all_reduce replaces the tensor that you give it by the sum over the ranks. So for each "
        "parameter give it parameter.grad, and then divide parameter.grad by md.size(), in place.",
        "for parameter in model.parameters(): if parameter.grad is not None: "
        "comm.all_reduce(parameter.grad), and then parameter.grad /= md.size().",
    ),
)
def average_gradients(answer: Answer, draw: np.random.Generator) -> Right:
    """Each gradient becomes the mean over the ranks."""
    tally, tried = Tally(), 0
    for ranks in RANKS:
        cases = []
        for case in range(4):
            sizes = draw_sizes(draw) if case else (2, 3)
            frozen = int(draw.integers(0, 2 * len(sizes) - 2)) if case == 3 else None
            args = [(sizes, frozen, draw_rows(draw, sizes, int(draw.integers(1, 5)))) for _ in range(ranks)]
            text = f"{ranks} rank{'s' * (ranks > 1)} with layers of sizes {sizes}"
            text += f", of whose parameters number {frozen} is frozen" if frozen is not None else ""
            cases.append(Case(args, text))
        if ranks > 1:
            cases.insert(0, tidy_case(ranks, tidy_gradients(ranks), lambda rows: (None, rows)))
        for run in driven(answer, _average, cases):
            own = [result[0] for result in run.results]
            right = [None if g[0] is None else sum(g) / ranks for g in zip(*own, strict=True)]
            for rank, (_, got) in enumerate(run.results):
                compare_gradients(run, got, right, rank)
                count(tally, run, rank, lengths_of(right))
            tried += 1
    return Right(tried, tally.scores)


def _of_batch(function: Callable[..., Any], sizes: Sequence[int], rows: Rows) -> Any:
    """On a rank: a step's gradients by the reader's function."""
    model = network(sizes)
    function(model, *rows)
    return gradients(model)


@lesson.exercise(
    "9.2",
    hints=(
        "The mean over all rows is the sum over all rows, divided by their number. Which of the two can "
        "each rank compute from its own rows, and which needs a message?",
        "First rows = comm.all_reduce(torch.tensor(len(inputs))): the number of rows on all ranks. Then "
        'divide the loss with reduction="sum" by rows, and call backward. Last, add up the gradients.',
        "rows = comm.all_reduce(torch.tensor(len(inputs))); loss = functional.cross_entropy(model(inputs), "
        'targets, reduction="sum") / rows; loss.backward(); and for each parameter comm.all_reduce('
        "parameter.grad), with no division after it.",
    ),
)
def batch_gradients(answer: Answer, draw: np.random.Generator) -> Right:
    """Gradients of the mean loss over the rows of all ranks."""
    tally, tried = Tally(), 0
    for ranks in RANKS:
        cases = []
        for case in range(5):
            sizes = draw_sizes(draw) if case else (2, 3)
            last = case == 4  # with ranks without rows: who leaves them out meets no further case
            drawn = draw.integers(0 if last else 1, 9, ranks).tolist()
            rows = [4 + 2 * rank for rank in range(ranks)] if case < 2 else drawn
            rows[0] += 1  # so that there is one at all
            if last and ranks > 1:
                rows[-1] = 0
            args = [(sizes, draw_rows(draw, sizes, each)) for each in rows]
            text = f"{ranks} rank{'s' * (ranks > 1)} with {', '.join(map(str, rows))} rows"
            cases.append(Case(args, text))
        if ranks > 1:
            cases.insert(0, tidy_case(ranks, tidy_row(ranks), lambda rows: (rows,)))
        for run in driven(answer, _of_batch, cases):
            sizes, rows = run.case.args[0][0], [args[1] for args in run.case.args]
            right, suspects = right_gradients(sizes, rows), of_means(sizes, rows)
            for rank, got in enumerate(run.results):
                compare_gradients(run, got, right, rank, suspects=suspects)
                count(tally, run, rank, [1, *lengths_of(right)])
            tried += 1
    return Right(tried, tally.scores)
