"""Checks of lesson 11: what a straggler costs, a parameter server, and gradients that come late."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checks.ranks import Case, says
from checks.settings import driven, waiting_or_not
from checks.support.exercises import Answer, Lesson
from checks.support.verdicts import Right, Tally, compare, unlike, wrong
from checks.support.words import plural

lesson = Lesson(11, "waiting_or_not")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution


@lesson.exercise(
    "11.1",
    hints=(
        "Take three workers that need 1, 1 and 2 seconds a step. If all wait for each other, how long does a "
        "round take, and how many gradients come out of it? If nobody waits, how many gradients a second "
        "does each make by itself?",
        "Waiting: n gradients every max(seconds) seconds. Not waiting: worker i makes 1 / seconds[i] of them "
        "a second, and those of all workers add up.",
        "return len(seconds) / max(seconds), sum(1 / each for each in seconds)",
    ),
)
def rates(answer: Answer, draw: np.random.Generator) -> Right:
    """Gradients a second, waiting and not."""
    tried = [[1.0, 2.0], [1.0], [0.5, 0.5], [1.0, 1.0, 10.0], [4.0, 1.0, 2.0]]
    tried += [draw.uniform(0.1, 5, size).round(2).tolist() for size in (2, 3, 8)]
    for seconds in tried:
        right = (len(seconds) / max(seconds), sum(1 / each for each in seconds))
        got = answer(list(seconds))
        call = f"rates({seconds})"
        if not isinstance(got, tuple) or len(got) != 2:
            kind = "None: does it end with return?" if got is None else f"{got!r}."
            wrong(f"{call} should be a pair, (waiting, not waiting); it is {kind}")
        mean = sum(seconds) / len(seconds)
        wrongs = {
            "waiting": {"That waits for the mean time: the slowest decides.": len(seconds) / mean},
            "not waiting": {"That takes the mean time: add up what each worker does.": len(seconds) / mean},
        }
        for what, mine, expected in zip(wrongs, got, right, strict=True):
            compare(mine, expected, f"{call}, gradients a second {what},", rtol=1e-9, wrongs=wrongs[what])
    return Right(len(tried))


@lesson.exercise(
    "11.2",
    hints=(
        "A step has three parts: parameters come from rank 0, a gradient is computed, the gradient goes to "
        "rank 0.",
        "comm.recv(x, 0) writes the newest parameters into x. gradient(x) is a tensor like x.",
        "for _ in range(steps): comm.recv(x, 0), and then comm.send(gradient(x), 0)",
    ),
)
def work(answer: Answer, draw: np.random.Generator) -> Right:
    """Each push is the gradient of what was pulled just before."""
    tally, tried = Tally(), 0
    for ranks in (2, 4):
        cases = []
        for size, steps in ((2, 2), (1, 1), (3, 4)):
            scale = float(draw.integers(2, 9))
            args = (torch.zeros(size, dtype=torch.float64), scale, steps)
            said = f"{ranks} ranks, {plural(steps, 'step')}, parameters of length {size}"
            cases.append(Case([args] * ranks, said))
        for run in driven(answer, waiting_or_not.with_server, cases, only=("send", "recv")):
            x, scale, steps = run.case.args[0]
            for step, worker, push in run.results[0]:
                right = waiting_or_not.values_at(step, worker, len(x)) * scale
                compare(push, right, f"On {says(run.case)}: push {step} of rank {worker}")
            for worker in range(1, ranks):
                idea = "compute one gradient for each pull"
                tally.add("Gradients that a worker computes", run.results[worker], steps, idea)
            tried += 1
    return Right(tried, tally.scores)


@lesson.exercise(
    "11.3",
    hints=(
        "serve_one(worker) is the other side of `work`: what that receives, this sends, and the other way "
        "round. It runs in a thread for each worker, so it may wait for its own worker as long as it takes.",
        "In each step: send a copy of x to the worker, receive its gradient into a tensor of its own, and "
        "subtract lr times the gradient from x, in place. Hold the lock while x is copied or changed, and "
        "never while waiting for a message.",
        "for _ in range(steps): with lock: values = x.clone(); then comm.send(values, worker); gradient = "
        "comm.recv(torch.empty_like(x), worker); and with lock: x.sub_(lr * gradient)",
    ),
)
def serve(answer: Answer, draw: np.random.Generator) -> Right:
    """Every push is an update at once, and nobody waits for another worker."""
    tried = 0
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 3, 4):
            cases = []
            for number, (kind, steps) in enumerate(
                (("towards 4", 1), ("towards 4", 3), ("own", 3), ("slow", 3))
            ):
                if (kind == "towards 4") != (ranks == 2):
                    continue
                start = torch.from_numpy(draw.integers(5, 30, 3).astype(np.float64))
                path = str(Path(folder) / f"{ranks}-{number}")
                said = f"{ranks} ranks, {plural(steps, 'step')} each"
                cases.append(Case([(start.clone(), 0.5, steps, kind, path) for _ in range(ranks)], said))
            for run in driven(answer, waiting_or_not.with_workers, cases, only=("send", "recv")):
                _check_server(run)
                tried += 1
    return Right(tried, remark="A fast worker made all its updates while a slow one computed its first.")


def _check_server(run: Any) -> None:
    start, lr, steps, kind, _ = run.case.args[0]
    where, ranks = says(run.case), len(run.results)
    right = start.clone()
    for step in range(steps):
        if kind == "towards 4":
            wrongs = {"No push has changed it yet: update x after each.": start} if step else {}
            what = f"On {where}: what rank 1 pulled for step {step}"
            compare(run.results[1][0][step], right, what, wrongs=wrongs)
            right -= lr * (right - 4)
        else:
            for worker in range(1, ranks):
                got = run.results[worker][0][step][worker - 1]
                own = start[worker - 1] - lr * 2 * step
                what = (
                    f"On {where}: what rank {worker} pulled for step {step}, after {step} pushes of its own,"
                )
                compare(got, own, f"{what} in the element that it alone changes")
            right[: ranks - 1] -= lr * 2
    if kind == "slow" and run.results[1][1]:
        wrong(
            f"On {where}: rank 2 could not finish while rank 1 computed its first gradient; it was kept "
            "waiting.",
            "  A thread may wait for its own worker, but it must not keep the others: is the lock held while "
            "it waits?",
        )
    result, clashes = run.results[0]
    if clashes:
        wrong(
            f"On {where}: two threads used x at the same time, one of them to change it (in {clashes[0]}).",
            "  With many parameters updates get lost, or are half read: use x inside `with lock:` alone.",
        )
    compare(result, right, f"On {where}: x after all pushes", before=start)
    compare(
        run.args[0][0],
        right,
        f"On {where}: the x that serve was given, which is changed in place,",
        before=start,
    )


@lesson.exercise(
    "11.4",
    hints=(
        "The derivative of curvature / 2 x^2 is curvature * x. Which x is it taken at, in update t, if it is "
        "`delay` updates old?",
        "x[t + 1] = x[t] - lr * curvature * x[t - delay]; while t is smaller than delay, x[0] in its place.",
        "x = [1.0]; for t in range(steps): x.append(x[t] - lr * curvature * x[max(t - delay, 0)]); return x",
    ),
)
def delayed_descent(answer: Answer, draw: np.random.Generator) -> Right:
    """All x from the first to the last."""
    calls = [(1.0, 0.5, 0, 0), (1.0, 0.5, 0, 3), (2.0, 0.25, 0, 3), (1.0, 0.5, 1, 4), (1.0, 0.25, 3, 8)]
    for delay in (0, 2, 5):
        curvature, lr = draw.uniform(0.5, 2, 2).round(2).tolist()
        calls.append((curvature, lr / 4, delay, int(draw.integers(6, 15))))
    for curvature, lr, delay, steps in calls:
        x = np.ones(steps + 1)
        for t in range(steps):
            x[t + 1] = x[t] - lr * curvature * x[max(t - delay, 0)]
        own = lesson.solution("delayed_descent")
        wrongs = {
            "That takes each gradient at the newest x.": own(curvature, lr, 0, steps),
            "That leaves out the curvature: the gradient is curvature times x.": own(1.0, lr, delay, steps),
        }
        answer.expect(x, curvature, lr, delay, steps, rtol=1e-9, wrongs=wrongs)
    return Right(len(calls))


@lesson.exercise(
    "11.5",
    hints=(
        "Who is the slowest? How far ahead of it is this worker?",
        "clocks[worker] - min(clocks) is how many steps it is ahead. With bound 0 it has to be none.",
        "return clocks[worker] - min(clocks) <= bound",
    ),
)
def may_begin(answer: Answer, draw: np.random.Generator) -> Right:
    """True where the worker is at most so many steps ahead of the slowest."""
    tried = 0
    lists = [[0], [3], [1, 0], [2, 2, 2], [5, 3, 4], draw.integers(0, 9, 4).tolist()]
    for clocks in lists:
        for worker in range(len(clocks)):
            for bound in (0, 1, 2, int(draw.integers(3, 8)), math.inf):
                right = clocks[worker] - min(clocks) <= bound
                call, got = f"may_begin({clocks}, {worker}, {bound})", answer(list(clocks), worker, bound)
                if not isinstance(got, (bool, np.bool_)):
                    wrong(f"{call} should be True or False; it is {got!r}.")
                if bool(got) != right:
                    done = f"worker {worker} has finished {clocks[worker]} steps, the slowest {min(clocks)}"
                    unlike(f"{call}: {done}.", right, bool(got))
                tried += 1
    return Right(tried)
