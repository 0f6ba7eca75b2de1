"""Checks of lesson 9: gradients averaged over ranks, by rows, in buckets, in backward, and once for many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from checks.exercises import Answer, Lesson
from checks.ranks import Case, Run, says
from checks.settings import driven
from checks.verdicts import Right, Tally, WrongAnswer, compare, number, wrong
from minidist import comm
from minidist.model import MLP
from minidist.parallel.training.activation_memory import ActivationCounter

lesson = Lesson(9, "data_parallel")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

RANKS = (2, 3, 4, 1)
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
"""Float64 has 16 digits; sums in another order cost few of them, and a wrong weight costs nearly all."""

Rows = tuple[Tensor, Tensor]  # inputs (rows, sizes[0]), targets (rows,)


def network(sizes: Sequence[int], frozen: int | None = None) -> MLP:
    """The same on all ranks; one of its parameters may be frozen."""
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


def compare_gradients(run: Run, got: Sequence[Any], right: Sequence[Any], rank: int, more: str = "") -> None:
    """WrongAnswer where one of a rank's gradients is not the right one; names its parameter."""
    names = [name for name, _ in network(run.case.args[0][0]).named_parameters()]
    for name, mine, expected in zip(names, got, right, strict=True):
        what = f"On {says(run.case)}, rank {rank}'s gradient of {name}{more}"
        if expected is None and mine is None:
            continue
        if expected is None:
            wrong(f"{what} should stay None: the parameter is frozen.")
        if mine is None:
            wrong(f"{what} is None: was there a backward pass?")
        compare(mine, expected, what, **CLOSE)


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
        "for parameter in model.parameters(): what comm.all_reduce is given becomes the sum over the ranks, "
        "in place. So give it parameter.grad, and divide that in place by md.size().",
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
        "First rows = comm.all_reduce(torch.tensor(len(inputs))): the number of rows on all ranks. Then the "
        "loss "
        'with reduction="sum", divided by rows, and backward. What is left is to add up the gradients.',
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
        for run in driven(answer, _of_batch, cases):
            sizes = run.case.args[0][0]
            right = right_gradients(sizes, [args[1] for args in run.case.args])
            for rank, got in enumerate(run.results):
                compare_gradients(run, got, right, rank)
                count(tally, run, rank, [1, *lengths_of(right)])
            tried += 1
    return Right(tried, tally.scores)


def greedy(lengths: Sequence[int], limit: int) -> list[int]:
    """Elements of each bucket, where neighbours are joined as long as they fit."""
    buckets: list[int] = []
    for length in lengths:
        if not buckets or buckets[-1] + length > limit:
            buckets.append(0)
        buckets[-1] += length
    return buckets


def runs_of(lengths: Sequence[int]) -> list[list[int]]:
    """All ways to join neighbours: the elements of each message, sorted; empty ones are left out."""
    ways: list[list[int]] = [[]]
    for length in filter(None, lengths):
        ways = [[*way, length] for way in ways] + [[*way[:-1], way[-1] + length] for way in ways if way]
    return [sorted(way) for way in ways]


def _in_buckets(function: Callable[..., Any], tensors: Sequence[Tensor], limit: int) -> Any:
    """On a rank: the tensors, as the reader's function leaves them."""
    tensors = [tensor.clone() for tensor in tensors]
    function(list(tensors), limit)  # who puts other tensors into the list has not changed these
    return tensors


@lesson.exercise(
    "9.3",
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
        for run in driven(answer, _in_buckets, cases, only=("all_reduce",)):
            _check_buckets(run, tally)
            tried += 1
    return Right(tried, tally.scores)


def bucket_cases(draw: np.random.Generator) -> list[tuple[list[tuple[int, ...]], int]]:
    """Shapes and limits: a single one, some that fit, one that is too large, none left over, random ones."""
    found: list[tuple[list[tuple[int, ...]], int]] = [
        ([(3,)], 8),
        ([(3,), (4,)], 8),
        ([(2, 3), (2,), (5,)], 8),
        ([(4,), (4,), (4,), (4,)], 8),
        ([(2,), (3, 5), (2,)], 8),
        ([(9,), (2,), (6,), (1,)], 8),
        ([(3,), (0,), (4, 1), ()], 5),
    ]
    for _ in range(2):
        shapes = [
            tuple(map(int, draw.integers(1, 5, draw.integers(1, 3)))) for _ in range(draw.integers(3, 9))
        ]
        found.append((shapes, int(draw.integers(4, 24))))
    return found


def whole(draw: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """Whole numbers, so that sums are exact in any order; none is 0."""
    return torch.from_numpy(draw.integers(1, 100, shape).astype(np.float32)) if shape else torch.tensor(7.0)


def _same_sum(got: Tensor, right: Any, what: str) -> None:
    try:
        compare(got, right, what)
    except WrongAnswer as error:
        copies = "t.reshape(-1) is a copy where t is not contiguous, and what you write to a copy is lost."
        wrong(str(error), *([f"  {copies}"] if not got.is_contiguous() else []))


def _check_buckets(run: Run, tally: Tally) -> None:
    tensors, limit = run.case.args[0]
    lengths = [tensor.numel() for tensor in tensors]
    ranks = len(run.calls)
    for rank, got in enumerate(run.results):
        for place, tensor in enumerate(got):
            right = sum(run.case.args[each][0][place] for each in range(ranks))
            _same_sum(tensor, right, f"On {says(run.case)}: rank {rank}'s tensor {place}")
        sent = [int(np.prod(call.shape)) for call in run.calls[rank]]
        for elements in sent:
            if elements > limit and elements not in lengths:
                wrong(
                    f"On {says(run.case)}: rank {rank} sends a message of {elements} elements, "
                    f"and the limit is {limit}."
                )
        if sorted(filter(None, sent)) not in runs_of(lengths):
            wrong(
                f"On {says(run.case)}: rank {rank} sends messages of {', '.join(map(str, sent))} elements.",
                "  Each should have neighbours of the list, whole and in order, and nothing else.",
            )
        tally.add(
            "Messages by each rank",
            len(sent),
            len(greedy(lengths, limit)),
            "join a tensor to the bucket before it as long as it fits",
        )
        par = 4 * sum(lengths)
        tally.add("Bytes in them", 4 * sum(sent), par, "send each element once")


def _hooked(function: Callable[..., Any], sizes: Sequence[int], steps: Sequence[Rows]) -> Any:
    """On a rank: some steps with the reader's hooks; what had begun, and was waited for, after backward."""
    model = network(sizes)
    finish = function(model)
    if not callable(finish):
        return finish
    found = []
    for inputs, targets in steps:
        model.zero_grad()
        with comm.ledger() as ledger:
            functional.cross_entropy(model(inputs), targets).backward()
            begun = len(ledger.calls)
            waited = sum(call.seconds > 0 for call in ledger.calls)  # known once a call was waited for
            finish()
        found.append((gradients(model), begun, waited))
    return found


@lesson.exercise(
    "9.4",
    hints=(
        "A hook is a function of your own that autograd calls with the parameter. In it, begin the "
        "all-reduce of parameter.grad and keep what has to be waited for. Who waits, and divides? finish, "
        "later.",
        "work = comm.all_reduce(parameter.grad, async_op=True) begins it. Put (work, parameter) into a list "
        "that both functions see. finish goes through the list: wait, divide; and it leaves the list empty, "
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
                f"and "
                "should return a function: finish, itself and not finish()."
            )
        for step, (got, begun, waited) in enumerate(result):
            sizes = run.case.args[0][0]
            rows = [args[1][step] for args in run.case.args]
            each = [right_gradients(sizes, [own]) for own in rows]
            right = [sum(same) / ranks for same in zip(*each, strict=True)]  # type: ignore[arg-type]
            if begun < len(right):
                wrong(
                    f"On {says(run.case)}: when backward had ended, rank {rank} had begun {begun} "
                    f"all-reduce{'s' * (begun != 1)} and should have begun {len(right)}, one for each "
                    f"parameter."
                )
            compare_gradients(run, got, right, rank, f" in step {step + 1}")
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
    "9.5",
    hints=(
        "backward adds to .grad what it finds. So how many times do gradients have to be sent, if they are "
        "sent after the last of the micro-batches?",
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
            for run in driven(answer, _of_micro_batches, cases) if cases else ():
                rows = [pair for args in run.case.args for pair in args[1]]
                right = right_gradients(run.case.args[0][0], rows)
                for rank, (got, held) in enumerate(run.results):
                    compare_gradients(run, got, right, rank)
                    _one_at_a_time(run, rank, held)
                    count(tally, run, rank, [1, *lengths_of(right)])
                tried += 1
    return Right(tried, tally.scores)


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
