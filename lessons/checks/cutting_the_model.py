"""Checks of lesson 12: a chain of layers in parts, one batch through them, and schedules for many."""

from __future__ import annotations

import numpy as np
from torch import nn

from checks.ranks import says
from checks.settings import cutting_the_model, driven
from checks.support.counted import Seen
from checks.support.exercises import Answer, Lesson
from checks.support.verdicts import Right, Tally, compare, not_none, unlike, wrong
from checks.support.written_schedules import SIZES, listed, schedule_of, simulated, sizes
from minidist.parallel import schedules

lesson = Lesson(12, "cutting_the_model")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution


@lesson.exercise(
    "12.1",
    hints=(
        "Go through the layers from the left, and keep two things: where the part that you are filling "
        "begins, and what it weighs so far. What happens when the next layer is too heavy for it?",
        "If weight + weights[i] > most, then layers begin to i - 1 are a part, and layer i begins a new one. "
        "Do not forget the last part, which no heavy layer ends.",
        "parts, begin, weight = [], 0, 0, then for i, each in enumerate(weights): if weight + each > most: "
        "parts.append(range(begin, i)) and begin, weight = i, 0; after that if: weight += each. After the "
        "loop, if begin < len(weights): parts.append(range(begin, len(weights))). Return parts.",
    ),
)
def fill(answer: Answer, draw: np.random.Generator) -> Right:
    """Consecutive parts, each as full as may be."""
    tally, tried = Tally(), 0
    lists = [[], [3], [2, 2], [1, 1, 1], [2, 1, 1, 3], [4, 0, 4, 0], [1, 2, 3, 4, 5]]
    lists += [draw.integers(0, 9, size).tolist() for size in (6, 9, 20)]
    for weights in lists:
        heaviest = max(weights, default=0)
        for most in sorted({heaviest, heaviest + 1, sum(weights)}):
            _check_parts(answer, weights, most, tally)
            tried += 1
    return Right(tried, tally.scores)


def _check_parts(answer: Answer, weights: list[int], most: int, tally: Tally) -> None:
    call, seen = f"fill({weights}, {most})", Seen(weights)
    got = answer(seen, most)
    not_none(got, call)
    right = _filled(weights, most)
    if not isinstance(got, list) or not all(isinstance(part, range) for part in got):
        unlike(f"{call} should be a list of ranges.", right, repr(got))
    found = [i for part in got for i in part]
    if found != list(range(len(weights))):
        unlike(f"{call} does not have each layer once, in order.", right, got)
    for part in got:
        if not part:
            unlike(f"{call} has an empty part, {part}.", right, got)
        weighs = sum(weights[i] for i in part)
        if weighs > most:
            unlike(f"{call}: the part {part} weighs {weighs}, more than {most}.", right, got)
    if got != right:
        unlike(f"{call}: a part ends although its next layer would fit.", right, got)
    tally.add("Weights read", seen.reads, len(weights), "add up as you go, and look at each layer once")


def _filled(weights: list[int], most: float) -> list[range]:
    """The same, plainly."""
    parts: list[range] = []
    for i in range(len(weights)):
        if parts and sum(weights[parts[-1].start : i + 1]) <= most:
            parts[-1] = range(parts[-1].start, i + 1)
        else:
            parts.append(range(i, i + 1))
    return parts


@lesson.exercise(
    "12.2",
    hints=(
        "Rank r needs x from rank r - 1, but for rank 0, whose x is inputs. It gives stage(x) to rank r + 1, "
        "but for the last, which makes a loss of it. Backward it is the other way round: what comes from "
        "where?",
        "A tensor that has arrived knows nothing of the rank before: x.requires_grad_() has autograd fill "
        "x.grad, which is what rank r - 1 waits for. And y.backward(g), with g received from rank r + 1, is "
        "a backward pass that starts from the gradient of y in place of a loss.",
        "x = inputs; if r > 0: x = comm.recv(torch.empty_like(inputs), r - 1).requires_grad_(). y = stage(x)."
        " On the last rank loss = ((y - targets) ** 2).mean() and loss.backward(); on the others "
        "comm.send(y.detach(), r + 1) and y.backward(comm.recv(torch.empty_like(y), r + 1)). Then, if r > 0: "
        "comm.send(x.grad, r - 1). Return loss.item() on the last rank.",
    ),
)
def step(answer: Answer, draw: np.random.Generator) -> Right:
    """Gradients and loss are those of one process."""
    tally, tried = Tally(), 0
    for ranks in (1, 2, 3, 4):
        cases = cutting_the_model.chains(draw, ranks)
        for run in driven(answer, cutting_the_model.with_gradients, cases, only=("send", "recv")):
            stages = [args[0] for args in run.case.args]
            inputs, targets = run.case.args[0][1:]
            loss = ((nn.Sequential(*stages)(inputs) - targets) ** 2).mean()
            loss.backward()
            where = says(run.case)
            for rank, (result, is_tensor, ran, gradients) in enumerate(run.results):
                for (key, parameter), got in zip(stages[rank].named_parameters(), gradients, strict=True):
                    what = f"On {where}, rank {rank}'s gradient of its stage's {key}"
                    if got is None:
                        wrong(f"{what} is None: no backward pass came to it.")
                    compare(got, parameter.grad, what, rtol=1e-10, atol=1e-12)
                if rank == ranks - 1:
                    what = f"On {where}, the loss that the last rank returns"
                    compare(result, loss.item(), what, 1e-10)
                    if is_tensor:
                        wrong(
                            f"{what} is a tensor, and should be a number: loss.item().",
                            "  The tensor holds on to its graph, and a training that keeps its losses runs "
                            "out of memory.",
                        )
                par = (rank < ranks - 1) + (rank > 0)
                idea = "an output to the next rank, a gradient to the rank before, and nothing else"
                tally.add("Messages sent by a rank", run.messages(rank), par, idea)
                idea = "keep y = stage(x): send it, and start the backward pass from it"
                tally.add("Forward passes of a stage", ran, 1, idea)
                before, after = (
                    [list(own[0].parameters()), *own[1:]] for own in (run.case.args[rank], run.args[rank])
                )
                answer.unchanged(f"On {where}, rank {rank}'s step", before, after)
            tried += 1
    return Right(tried, tally.scores)


@lesson.exercise(
    "12.3",
    hints=(
        "A schedule is a list with a list for each rank. In GPipe all ranks have the same list.",
        '[Instruction("forward", i) for i in range(micro_batches)] are the forward passes of a rank.',
        'return [[Instruction(kind, i) for kind in ("forward", "backward") for i in range(micro_batches)] '
        "for _ in range(ranks)]",
    ),
)
def gpipe(answer: Answer, draw: np.random.Generator) -> Right:
    """All forward passes before all backward passes."""
    tried = 0
    for ranks, micro_batches in sizes(draw):
        schedule, call = schedule_of(answer, ranks, micro_batches, ("forward", "backward"))
        for rank, own in enumerate(schedule):
            order = [each.kind for each in own]
            if order != sorted(order, reverse=True):
                first = order.index("backward")
                later = next(each for each in own[first:] if each.kind == "forward")
                wrong(
                    f"{call}: rank {rank} has {own[first]} before {later}. In GPipe all forward passes come "
                    "first."
                )
        simulated(schedule, call, micro_batches)
        tried += 1
    return Right(tried)


@lesson.exercise(
    "12.4",
    hints=(
        "Take a forward and a backward pass of one micro-batch through one stage as 1 unit of time. How many "
        "units does a rank work? And how many units pass from the beginning to the end of the chart?",
        "A rank works m units. All of it takes m + p - 1: the last rank begins p - 1 forward passes late, "
        "and the first ends p - 1 backward passes after it. What is left over is p - 1.",
        "return (ranks - 1) / (micro_batches + ranks - 1)",
    ),
)
def bubble(answer: Answer, draw: np.random.Generator) -> Right:
    """The share of time in which ranks wait."""
    sizes = [(4, 8), *SIZES, (1000, 1), (7, int(draw.integers(1, 50))), (int(draw.integers(2, 50)), 64)]
    got = [answer(*each) for each in ((2, 1), (4, 8), (8, 64))]
    if all(isinstance(each, (int, float)) for each in got) and np.allclose(got, [1, 3 / 8, 7 / 64]):
        wrong(
            "bubble(4, 8) is 0.375, and should be 3 / 11 = 0.2727.",
            "  (p - 1) / m is the time lost over the time worked, as Narayanan et al. 2021 count. Here the "
            "share of all the time is asked, waiting included.",
        )
    for ranks, micro_batches in sizes:
        right = (ranks - 1) / (micro_batches + ranks - 1)
        wrongs = {
            "That is the share of time in which ranks work; the bubble is the rest.": 1 - right,
            "That counts one rank too many: the last begins ranks - 1 passes late.": ranks
            / (micro_batches + ranks),
        }
        answer.expect(right, ranks, micro_batches, rtol=1e-9, wrongs=wrongs)
    return Right(len(sizes))


@lesson.exercise(
    "12.5",
    hints=(
        "The last rank is the easiest: F0 B0 F1 B1 F2 B2 and so on. The rank before it has to start one "
        "forward pass earlier, so that the last has something to do: F0 F1 B0 F2 B1 F3 B2 ... How many "
        "forward passes does rank r start with?",
        "Rank r starts with ranks - 1 - r forward passes (or all there are, if they are fewer). Then come "
        "pairs of one forward and one backward pass, and in the end the backward passes that are left.",
        "ahead = min(ranks - 1 - rank, micro_batches); own = [Instruction('forward', i) for i in "
        "range(ahead)]; then for i in range(micro_batches): if ahead + i < micro_batches: "
        "own.append(Instruction('forward', ahead + i)); and always own.append(Instruction('backward', i)).",
    ),
)
def one_f_one_b(answer: Answer, draw: np.random.Generator) -> Right:
    """As fast as GPipe, with less to hold."""
    tally, tried = Tally(), 0
    for ranks, micro_batches in sizes(draw):
        schedule, call = schedule_of(answer, ranks, micro_batches, ("forward", "backward"))
        found = simulated(schedule, call, micro_batches)
        for rank, held in enumerate(found.peak_activations):
            most = min(micro_batches, ranks - rank)
            if held > most:
                wrong(
                    f"{call}: rank {rank} holds {held} micro-batches at a time, and {most} "
                    f"{'is' if most == 1 else 'are'} enough.",
                    f"  its list begins {listed(schedule[rank])}",
                )
        idea = "rank r begins with p - 1 - r forward passes, so that nobody after it waits"
        tally.add("Units of time", found.seconds, 3 * (micro_batches + ranks - 1), idea)
        tried += 1
    return Right(tried, tally.scores)


@lesson.exercise(
    "12.6",
    hints=(
        "Begin with your one_f_one_b, and write two instructions for each backward pass. If the second comes "
        "right after the first, what has changed for the rank before? Draw it with gantt.",
        "On rank 0 nothing is gained by waiting. The later ranks have their bubble at the end, while "
        "the gradients travel back: keep some weight passes for it. Rank r can keep r of them back.",
        "For each rank: waiting = []; for each of its 1F1B: a forward pass is taken as it is; for a backward "
        "pass append Instruction('backward_input', i) to the list and Instruction('backward_weight', i) to "
        "waiting, and if len(waiting) > rank, append waiting.pop(0). In the end append all of waiting.",
    ),
)
def my_schedule(answer: Answer, draw: np.random.Generator) -> Right:
    """Shorter than 1F1B, with no more to hold."""
    tally, tried = Tally(), 0
    kinds = ("forward", "backward", "backward_input", "backward_weight")
    for ranks, micro_batches in sizes(draw):
        schedule, call = schedule_of(answer, ranks, micro_batches, kinds)
        found = simulated(schedule, call, micro_batches)
        plain = 3 * (micro_batches + ranks - 1)
        if ranks > 1 and found.seconds >= plain:
            wrong(
                f"{call} takes {found.seconds:g} units of time. 1F1B takes {plain}: yours is to be shorter."
            )
        best = schedules.simulate(schedules.zero_bubble(ranks, micro_batches))
        held = max(found.peak_activations)
        idea = "start backward passes early, and do not put off too many weight passes"
        tally.add("Micro-batches that a rank holds", held, max(best.peak_activations), idea)
        idea = "keep weight passes back for when a rank would wait; rank r has room for r of them"
        tally.add("Units of time", found.seconds, best.seconds, idea)
        tried += 1
    return Right(tried, tally.scores)
