"""Checks of lesson 11: what a straggler costs, a parameter server, and gradients that come late."""

from __future__ import annotations

import functools
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import minidist as md
from checks.exercises import Answer, Lesson
from checks.ranks import Case, on_ranks, says
from checks.verdicts import Right, Tally, compare, wrong
from minidist import comm

lesson = Lesson(11, "waiting_or_not")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

PATIENCE = 5.0
"""Seconds that a slow worker waits for a fast one to finish; with a server that serves both it takes none."""


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
    tried = [[1.0], [0.5, 0.5], [1.0, 2.0], [1.0, 1.0, 10.0], [4.0, 1.0, 2.0]]
    tried += [draw.uniform(0.1, 5, size).round(2).tolist() for size in (2, 3, 8)]
    for seconds in tried:
        right = (len(seconds) / max(seconds), sum(1 / each for each in seconds))
        got = answer(list(seconds))
        call = f"rates({seconds})"
        if not isinstance(got, tuple) or len(got) != 2:
            kind = "None: does it end with return?" if got is None else f"{got!r}."
            wrong(f"{call} should be a pair, (waiting, not waiting); it is {kind}")
        for what, mine, expected in zip(("waiting", "not waiting"), got, right, strict=True):
            compare(mine, expected, f"{call}, gradients a second {what},", rtol=1e-9)
    return Right(len(tried))


def with_server(function: Callable[..., Any]) -> Callable[..., Any]:
    """Rank 0 serves the workers in turn; the others work as the answer does, and count its gradients."""

    @functools.wraps(function)
    def run(x: Tensor, scale: float, steps: int) -> Any:
        if md.rank() > 0:
            computed = []

            def gradient(values: Tensor) -> Tensor:
                computed.append(values.clone())
                return values * scale

            function(gradient, x, steps)
            return len(computed)
        pushes = []
        for step in range(steps):
            for worker in range(1, md.size()):
                comm.send(values_at(step, worker, len(x)), worker)
                pushes.append((step, worker, comm.recv(torch.empty_like(x), worker)))
        return pushes

    return run


def values_at(step: int, worker: int, size: int) -> Tensor:
    """What the check's server has for a worker; never the same."""
    return torch.arange(1, size + 1, dtype=torch.float64) + 10 * worker + 100 * step


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
    wrapped, tally, tried = Answer(answer.name, with_server(answer.function)), Tally(), 0
    for ranks in (2, 4):
        cases = []
        for size, steps in ((1, 1), (2, 2), (3, 4)):
            scale = float(draw.integers(2, 9))
            args = (torch.zeros(size, dtype=torch.float64), scale, steps)
            said = f"{ranks} ranks, {steps} step{'s' * (steps > 1)}, parameters of length {size}"
            cases.append(Case([args] * ranks, said))
        for run in on_ranks(wrapped, cases, only=("send", "recv")):
            x, scale, steps = run.case.args[0]
            for step, worker, push in run.results[0]:
                right = values_at(step, worker, len(x)) * scale
                compare(push, right, f"On {says(run.case)}: push {step} of rank {worker}")
            for worker in range(1, ranks):
                idea = "compute one gradient for each pull"
                tally.add("Gradients that a worker computes", run.results[worker], steps, idea)
            tried += 1
    return Right(tried, tally.scores)


READS = {"clone", "__add__", "add", "__sub__", "sub", "__rsub__", "__mul__", "mul"}
WRITES = {"sub_", "add_", "copy_", "mul_", "__isub__", "__iadd__", "__setitem__"}


def watched(x: Tensor) -> tuple[Tensor, list[str]]:
    """x on the same memory, and a list that names an operation in which two threads used it at once.

    Each use of it lasts some milliseconds, as it would with many parameters: without a lock threads meet.
    """
    clashes: list[str] = []
    inside: list[bool] = []  # of each use under way, whether it writes

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            name = function.__name__
            used = name in READS | WRITES
            if used:
                if inside and (name in WRITES or any(inside)):
                    clashes.append(name)
                inside.append(name in WRITES)
                time.sleep(0.003)
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **(kwargs or {}))
            finally:
                if used:
                    inside.remove(name in WRITES)

    return x.as_subclass(Watched), clashes


def with_workers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Rank 0 serves as the answer does; the others pull and push, and keep what they pulled."""

    @functools.wraps(function)
    def run(x: Tensor, lr: float, steps: int, kind: str, path: str) -> Any:
        if md.rank() == 0:
            seen, clashes = watched(x)
            result = function(seen, lr, steps)
            return (result.as_subclass(Tensor) if isinstance(result, Tensor) else result), clashes
        pulled, late = [], False
        for step in range(steps):
            comm.recv(x, 0)
            pulled.append(x.clone())
            if kind == "slow" and md.rank() == 1 and step == 0:
                late = not _comes(path)
            comm.send(_gradient(kind, x), 0)
        if md.rank() == 2:
            Path(path).touch()
        return pulled, late

    return run


def _gradient(kind: str, x: Tensor) -> Tensor:
    if kind == "towards 4":
        return x - 4
    own = torch.zeros_like(x)  # each worker has an element of its own
    own[md.rank() - 1] = 2.0
    return own


def _comes(path: str) -> bool:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if Path(path).exists():
            return True
        time.sleep(0.002)
    return False


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
    wrapped, tried = Answer(answer.name, with_workers(answer.function)), 0
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
                said = f"{ranks} ranks, {steps} step{'s' * (steps > 1)} each"
                cases.append(Case([(start.clone(), 0.5, steps, kind, path) for _ in range(ranks)], said))
            for run in on_ranks(wrapped, cases, only=("send", "recv")):
                _check_server(run)
                tried += 1
    return Right(tried, remark="A fast worker made all its updates while a slow one computed its first.")


def _check_server(run: Any) -> None:
    start, lr, steps, kind, _ = run.case.args[0]
    where, ranks = says(run.case), len(run.results)
    right = start.clone()
    for step in range(steps):
        if kind == "towards 4":
            compare(run.results[1][0][step], right, f"On {where}: what rank 1 pulled for step {step}")
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
    compare(result, right, f"On {where}: x after all pushes")
    compare(run.args[0][0], right, f"On {where}: the x that serve was given, which is changed in place,")


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
        answer.expect(x, curvature, lr, delay, steps, rtol=1e-9)
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
                    wrong(
                        f"{call}: worker {worker} has finished {clocks[worker]} steps, the slowest "
                        f"{min(clocks)}.",
                        f"  expected {right}",
                        f"  got      {bool(got)}",
                    )
                tried += 1
    return Right(tried)
