"""Checks of lesson 16: six pages with a mistake that the loss does not show, each a case of `hunting.py`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from checks.hunting import BEGIN, PRICES, Case
from checks.pictures import evidence
from checks.support import progress
from checks.support.answers import Answer
from checks.support.exercises import Lesson
from checks.support.verdicts import Right
from minidist.plain.mistakes import collection

lesson = Lesson(16, "silent_bugs")
or_solution = lesson.or_solution

CASES = {
    "case_1": Case(
        "mean-of-means",
        "We moved a training from one GPU to two. The seed is the same, and so are the batches. The loss "
        "curves lie on each other, but no loss in the log is quite what it was, not even the first. "
        "Rounding, my colleagues say.",
        PRICES["first loss"],
    ),
    "case_2": Case(
        "norms-not-reduced",
        "With sequence parallelism our model trains as fast as promised, and the loss curve looks right. But "
        "a checkpoint that rank 0 has written is not the one that rank 1 has written.",
        PRICES["gradients"],
    ),
    "case_3": Case(
        "parameters-not-freed",
        "ZeRO 3 trains as data parallelism does, to the last digit: the losses, the weights, the norm. So we "
        "doubled the layers, and ordered twice as many GPUs. All jobs die in the first step.",
        PRICES["memory"],
    ),
    "case_4": Case(
        "hidden-blocks-computed",
        "We train on long rows with ring attention. Every result is right, and every step takes longer than "
        "our calculation says. We think of a faster network.",
        PRICES["work"],
    ),
    "case_5": Case(
        "experts-clip-alone",
        "Our mixture of experts has clipped its gradients since last week, and the loss has not moved. But "
        "the routers, of which every rank has the same copy, are no longer the same.",
        PRICES["norm"],
    ),
    "case_6": Case(
        "random-state-of-rank-0",
        "Every week we train the same small model, and on most of them we get the same weights, to the bit. "
        "In the weeks when the cluster goes down for service we get others. The loss is as good.",
        PRICES["resume"],
    ),
}
HINTS = {
    "case_1": (
        "The first loss comes before the first step, so no gradient can be to blame. What makes a loss of "
        "this rank's rows?",
        "Two ranks have 6 and 5 rows. What does a row of each count in a mean of two means?",
        "This rank's part of the mean over all rows is its own mean, times len(inputs) / len(batch[0]). The "
        "line that ends with / ranks counts every rank the same.",
    ),
    "case_2": (
        "Ask for the gradients: which of them differ, and what do their layers have in common?",
        "Every rank has T / n of the tokens where a norm is. What does the gradient of its weight lack?",
        "The loop at the end of a step leaves out nn.LayerNorm. All parameters that are not cut, norms too, "
        "need the sum over the ranks: `if p not in parts:`.",
    ),
    "case_3": (
        "Results are right, so ask for what a run costs. Then read what the docstring promises of a layer: "
        "when does a rank have the whole of it?",
        "gather makes a layer's parameters whole, twice in a step. Who calls free, and when?",
        "A layer is done twice: after its forward pass, in forward_done, before the hook is registered, and "
        "after its backward pass, in gradient_arrived, after self.reduce(). There, free it if not "
        "self.keep.parameters.",
    ),
    "case_4": (
        "A step may take long because ranks send too much, or compute too much. Two detectors tell which.",
        "The scores of a block are a product of matrices. Which blocks' scores does nobody use?",
        "In both passes scores(...) stands above `if owner <= rank:`, so that it runs for blocks that lie in "
        "the future, too. Move it below. Do not skip the sends in the backward pass: others wait for them.",
    ),
    "case_5": (
        "What do all parameters share once their gradients are clipped? One number. Ask for it.",
        "Every rank has experts of its own. Whose experts does each rank's norm count?",
        "`squares` has the gradients of this rank's experts alone. The norm needs those of all ranks: "
        "squares = comm.all_reduce(sum(...)).",
    ),
    "case_6": (
        "In a week with service the training goes on from a checkpoint. What does a training need, beside "
        "its weights, to go on as if nothing had happened?",
        "Dropout has a generator for each micro-batch, and the ranks take micro-batches in turn. Which rank "
        "knows how far the generator of micro-batch i has come?",
        "Micro-batch i is rank i % ranks's: own = range(rank, m, ranks). So that rank has to broadcast the "
        "state, and not rank 0.",
    ),
}


def _register(label: str, name: str) -> None:
    def checker(answer: Answer, draw: np.random.Generator) -> Right:
        """The mended page equals one process, and costs what it has to."""
        return CASES[name].verdict(answer(), draw)

    checker.__name__ = name
    lesson.exercise(label, HINTS[name])(checker)


for number, name in enumerate(CASES, 1):
    CASES[name].title = f"Case {number}."
    _register(f"16.{number}", name)


def hunt(number: int) -> Case:
    """Open a case: show its report and its page."""
    case = CASES[f"case_{number}"]
    case.show()
    return case


def check(answer: Any, seed: int | None = None, points: float | None = None) -> float | None:
    """As in every lesson; a refused mend costs points."""
    case = CASES.get(getattr(answer, "__name__", ""))
    if case is None:
        return lesson.check(answer, seed, points)
    with case.counted():
        return lesson.check(answer, seed, points)


def hint(name: Any = None) -> None:
    """As in every lesson, for points."""
    lesson.hint(name)
    for each, case in CASES.items():
        if case.closed is None:
            case.hints = lesson.exercises[each].hints_given


def scoreboard() -> None:
    """Show the points of all cases, those of the first time where a case was closed before."""
    kept = progress.read("points").get(lesson.topic, {})
    evidence.scoreboard(
        [
            (case.title.rstrip("."), kept.get(name, case.closed), BEGIN - case.par)
            for name, case in CASES.items()
        ]
    )


def another(seed: int | None = None) -> Case:
    """Draw a case from the rest of the collection, with what a user saw as its report."""
    rest = [each for name, each in collection().items() if name not in {case.name for case in CASES.values()}]
    drawn = (random.Random(seed) if seed is not None else random.SystemRandom()).choice(rest)
    case = Case(drawn.name, drawn.symptom, PRICES["gradients"], "Another case.")
    case.show()
    return case
