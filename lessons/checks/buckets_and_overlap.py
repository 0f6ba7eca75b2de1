"""Checks of lesson 10: gradients in buckets, sent in backward, and sent once for many micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from checks.data_parallel import (
    RANKS,
    Rows,
    compare_gradients,
    count,
    draw_rows,
    draw_sizes,
    gradients,
    lengths_of,
    network,
    of_means,
    right_gradients,
    tidy_case,
    tidy_gradients,
    tidy_row,
)
from checks.ranks import Case, Run, says
from checks.settings import driven
from checks.support.bucket_messages import bucket_cases, check_buckets, whole
from checks.support.contributions import tens
from checks.support.exercises import Answer, Lesson
from checks.support.verdicts import Right, Tally, wrong
from checks.support.words import number, plural
from minidist import comm
from minidist.parallel.training.activation_memory import ActivationCounter

lesson = Lesson(10, "buckets_and_overlap")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution


def _in_buckets(function: Callable[..., Any], tensors: Sequence[Tensor], limit: int) -> Any:
    """On a rank: the memory of each tensor, and whether the reader's function gave it another."""
    tensors = [tensor.clone() for tensor in tensors]
    memory = [tensor.detach() for tensor in tensors]  # as a view or an optimizer would see it
    function(list(tensors), limit)  # an answer that puts other tensors into the list has not changed these
    moved = [x.data_ptr() != tensor.data_ptr() for x, tensor in zip(memory, tensors, strict=True)]
    return memory, moved


@lesson.exercise(
    "10.1",
    hints=(
        "Two jobs. First decide which tensors go together: walk through them, and begin a new list when the "
        "next one does not fit any more. Then do for each list what the text does for `a` and `b`.",
        "buckets, held = [[]], 0. For each tensor: if buckets[-1] has some and held + tensor.numel() > "
        "limit, append a new [] and let held be 0; then put the tensor into buckets[-1] and add its length "
        "to held.",
        "for bucket in buckets: flat = torch.cat([t.reshape(-1) for t in bucket]); comm.all_reduce(flat); "
        "parts = flat.split([t.numel() for t in bucket]); for t, part in zip(bucket, parts): "
        "t.copy_(part.view(t.shape)).",
    ),
)
def all_reduce_in_buckets(answer: Answer, draw: np.random.Generator) -> Right:
    """Each tensor becomes its sum over the ranks, in few messages."""
    tally, tried = Tally(), 0
    for ranks in RANKS:
        cases = []
        for shapes, limit in bucket_cases(draw):
            args = [([whole(draw, shape) for shape in shapes], limit) for _ in range(ranks)]
            text = f"{ranks} rank{'s' * (ranks > 1)}, tensors of shapes {', '.join(map(str, shapes))}"
            text += f", limit {limit}"
            cases.append(Case(args, text))
        across = [([whole(draw, (2, 3)).t(), whole(draw, (2,))], 8) for _ in range(ranks)]
        text = (
            f"{ranks} rank{'s' * (ranks > 1)}, tensors of shapes (3, 2), (2,), limit 8, the first transposed"
        )
        cases.append(Case(across, text))
        if ranks > 1:
            full = [[torch.full(shape, 10.0**rank) for shape in ((2, 3), (2,))] for rank in range(ranks)]
            tidy = [(tensors, 8) for tensors in full]
            text = f"{plural(ranks, 'rank')}, tensors of shapes (2, 3), (2,), full of {tens(ranks)}, limit 8"
            cases.insert(0, Case(tidy, text))
        for run in driven(answer, _in_buckets, cases, only=("all_reduce",)):
            check_buckets(run, tally)
            tried += 1
    return Right(tried, tally.scores)


def _hooked(function: Callable[..., Any], sizes: Sequence[int], steps: Sequence[Rows]) -> Any:
    """On a rank: some steps with the reader's hooks; what had begun, and was waited for, after backward.

    Also what had begun when each of the gradients was there: hooks run in the order in which they were given.
    """
    model = network(sizes)
    finish = function(model)
    if not callable(finish):
        return finish
    found = []
    for inputs, targets in steps:
        model.zero_grad()
        early = list[int]()
        for parameter in model.parameters():  # in each step, since the reader may have given hooks anew
            parameter.register_post_accumulate_grad_hook(lambda _, own=early: own.append(len(ledger.calls)))
        with comm.ledger() as ledger:
            functional.cross_entropy(model(inputs), targets).backward()
            begun = len(ledger.calls)
            waited = sum(call.seconds > 0 for call in ledger.calls)  # known once a call was waited for
            finish()
        found.append((gradients(model), begun, waited, list(early)))
    return found


@lesson.exercise(
    "10.2",
    hints=(
        "A hook is a function of your own that autograd calls with the parameter. In the hook, begin the "
        "all-reduce of parameter.grad, and keep the work that it returns. finish waits for it, and divides.",
        "work = comm.all_reduce(parameter.grad, async_op=True) begins it. Put (work, parameter) into a list "
        "that both functions see. finish goes through the list, waits and divides. Then it empties the list "
        "for the next step.",
        "under_way = []; def start(parameter): under_way.append((comm.all_reduce(parameter.grad, "
        "async_op=True), parameter)); each parameter gets "
        "parameter.register_post_accumulate_grad_hook(start); def finish(): for work, parameter in "
        "under_way: work.wait(); parameter.grad /= md.size(); and then under_way.clear(). Return finish.",
    ),
)
def reduce_in_backward(answer: Answer, draw: np.random.Generator) -> Right:
    """Gradients are averaged; each reduction begins in backward, and nobody waits there."""
    tally, tried = Tally(), 0
    for ranks in RANKS:
        cases = []
        for case in range(3):
            sizes = draw_sizes(draw) if case else (2, 3)
            args = [(sizes, [draw_rows(draw, sizes, 3) for _ in range(case + 1)]) for _ in range(ranks)]
            text = f"{ranks} rank{'s' * (ranks > 1)} with layers of sizes {sizes}"
            cases.append(Case(args, text))
        if ranks > 1:
            cases.insert(0, tidy_case(ranks, tidy_gradients(ranks), lambda rows: ([rows],)))
        for run in driven(answer, _hooked, cases):
            _check_hooks(run, tally)
            tried += 1
    return Right(tried, tally.scores)


def _check_hooks(run: Run, tally: Tally) -> None:
    ranks = len(run.calls)
    for rank, result in enumerate(run.results):
        if not isinstance(result, list):
            wrong(
                f"reduce_in_backward(model) returns {'None' if result is None else type(result).__name__}, "
                "and should return a function: finish, itself and not finish()."
            )
        for step, (got, begun, waited, early) in enumerate(result):
            sizes = run.case.args[0][0]
            rows = [args[1][step] for args in run.case.args]
            each = [right_gradients(sizes, [own]) for own in rows]
            right = [sum(same) / ranks for same in zip(*each, strict=True)]  # type: ignore[arg-type]
            if begun < len(right):
                wrong(
                    f"On {says(run.case)}: when backward had ended, rank {rank} had begun "
                    f"{plural(begun, 'all-reduce')} and should have begun {len(right)}, one a parameter."
                )
            compare_gradients(run, got, right, rank, f" in step {step + 1}")
            for arrived, had_begun in enumerate(early, 1):
                if had_begun < arrived:
                    wrong(
                        f"On {says(run.case)}: the gradients are right, but when {arrived} of {len(right)} "
                        f"had come, rank {rank} had begun {plural(had_begun, 'all-reduce')}.",
                        "  Each parameter's hook begins the all-reduce of its own gradient, while backward "
                        "goes on. At its end, nothing is left to hide a message behind.",
                    )
            tally.add(
                "All-reduces that backward waited for",
                waited if ranks > 1 else 0,
                0,
                "begin them with async_op=True in the hook, and wait in finish",
            )
        count(tally, run, rank, lengths_of(right) * len(result))


def _of_micro_batches(function: Callable[..., Any], sizes: Sequence[int], rows: list[Rows]) -> Any:
    """On a rank: a step's gradients by the reader's function, and the most that its graphs held at a time."""
    model = network(sizes)
    with ActivationCounter(model, [inputs for inputs, _ in rows]) as counter:
        function(model, rows)
    return gradients(model), counter.peak


def _held_by_one(sizes: Sequence[int], rows: Sequence[Rows]) -> int:
    """Bytes that the graph of the largest micro-batch holds."""
    held = [0]
    for inputs, targets in rows:
        model = network(sizes)
        with ActivationCounter(model, [inputs]) as counter:
            (functional.cross_entropy(model(inputs), targets, reduction="sum") / torch.tensor(2)).backward()
        held.append(counter.peak)
    return max(held)


@lesson.exercise(
    "10.3",
    hints=(
        "backward adds to what .grad already holds. If you send the gradients after the last micro-batch, "
        "how many times do you have to send them?",
        "As in batch_gradients: first the rows, now of all micro-batches of all ranks, in one all-reduce of "
        "one number. Then a backward for each micro-batch, of the sum of its losses divided by those rows. "
        "Then an all-reduce for each parameter.",
        "rows = comm.all_reduce(torch.tensor(sum(len(inputs) for inputs, _ in micro_batches))); for inputs, "
        'targets in micro_batches: (functional.cross_entropy(model(inputs), targets, reduction="sum") / '
        "rows).backward(); for parameter in model.parameters(): if parameter.grad is None, give it "
        "torch.zeros_like(parameter); then comm.all_reduce(parameter.grad).",
    ),
)
def accumulate_gradients(answer: Answer, draw: np.random.Generator) -> Right:
    """Gradients of the mean loss over all micro-batches of all ranks, sent once."""
    tally, tried = Tally(), 0
    for ranks in RANKS:
        equal = [[6] * 4] * ranks
        some = [_drawn_rows(draw, 2) for _ in range(ranks)]
        others = [_drawn_rows(draw, int(many)) for many in draw.integers(1, 5, ranks)]
        without = [*[_drawn_rows(draw, 2) for _ in range(ranks - 1)], []]
        # Each part is a run of its own: what goes wrong in the first is told first.
        for part in ([some, equal], [others], [without] if ranks > 1 else []):
            cases = [_micro_batch_case(draw, rows, small=rows is some) for rows in part]
            if ranks > 1 and some in part:
                cases.insert(0, tidy_case(ranks, tidy_row(ranks), lambda rows: ([rows],)))
            for run in driven(answer, _of_micro_batches, cases) if cases else ():
                rows = [pair for args in run.case.args for pair in args[1]]
                sizes = run.case.args[0][0]
                right, suspects = right_gradients(sizes, rows), of_means(sizes, rows, "micro-batches")
                suspects |= _of_last(sizes, run)
                for rank, (got, held) in enumerate(run.results):
                    compare_gradients(run, got, right, rank, suspects=suspects)
                    _one_at_a_time(run, rank, held)
                    count(tally, run, rank, [1, *lengths_of(right)])
                tried += 1
    return Right(tried, tally.scores)


def _of_last(sizes: Sequence[int], run: Run) -> dict[str, Sequence[Any]]:
    """A suspect: the gradient that is left where each micro-batch's takes the place of the one before."""
    last = [args[1][-1] for args in run.case.args if args[1]]
    part = sum(len(x) for x, _ in last) / sum(len(x) for args in run.case.args for x, _ in args[1])
    says = "That is the gradient of each rank's last micro-batch alone: backward adds to .grad, so keep it."
    return {says: [part * each for each in right_gradients(sizes, last)]} if part < 1 else {}


def _drawn_rows(draw: np.random.Generator, micro_batches: int) -> list[int]:
    return [int(rows) + 1 for rows in draw.permutation(8)[:micro_batches]]


def _micro_batch_case(draw: np.random.Generator, rows: Sequence[Sequence[int]], small: bool) -> Case:
    """A case with so many rows in each micro-batch of each rank."""
    sizes = (2, 3) if small else draw_sizes(draw)
    ranks = f"{len(rows)} rank{'s' * (len(rows) > 1)}"
    text = " and ".join(", ".join(map(str, own)) if own else "no" for own in rows)
    args = [(sizes, [draw_rows(draw, sizes, each) for each in own]) for own in rows]
    return Case(args, f"{ranks} with micro-batches of {text} rows")


def _one_at_a_time(run: Run, rank: int, held: int) -> None:
    """WrongAnswer where several micro-batches' graphs live together."""
    sizes, rows = run.case.args[rank]
    par = _held_by_one(sizes, rows)
    if held > 1.5 * par and len(rows) > 1:
        wrong(
            f"On {says(run.case)}: the gradients are right, but rank {rank} keeps {number(held)} bytes for "
            f"backward at a time; its largest micro-batch alone needs {number(par)}.",
            "  A batch is cut because it does not fit. Call backward after each micro-batch: that frees what "
            "its forward pass kept.",
        )
