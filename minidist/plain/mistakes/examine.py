"""Examine a mistake: ask the detectors of any training (minidist/parallel/debugging), and the ladder's own.

The ladder's formulas decide in `sent` and `held`; `resume` and `placements` are detectors of their own.

They see runs alone, and never which mistake there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from minidist.parallel.debugging import detectors
from minidist.parallel.debugging.detectors import Detector, Found, Subject, ask
from minidist.plain.mistakes import Mistake, lone_rank
from minidist.plain.mistakes.formulas import held_by, sent_by
from minidist.plain.mistakes.trainings import T, Trainings, alone, load, model_of, unchanged


def resume(it: Subject) -> str:
    """A training that goes on from a checkpoint ends as the one that was not stopped, bit for bit."""
    if it.found.rung.rung != "recipe":
        return ""  # the rungs save nothing
    pairs = zip(it.found["resumed"].parameters, it.found["whole"].parameters, strict=True)
    for rank, (found, right) in enumerate(pairs):
        for name, value in right.items():
            if not torch.equal(found[name], value):
                return f"{name} is another on rank {rank} after a checkpoint"
    return ""


def sent(it: Subject) -> str:
    """Every rank sends the bytes of its page's formula in a step, and in all what a right training sends."""
    rung, n = it.found.rung, it.found.n
    for rank in range(n):
        in_1, in_all = (
            sum(call.sent for call in it.found[name].calls[rank] if call.shape != (steps,))  # the losses
            for name, steps in (("step", 1), ("short", detectors.SHORT))
        )
        found = (in_all - in_1) // (detectors.SHORT - 1)
        model, tokens = model_of(rung.model, 0), rung.rows * T
        right = None if rung.on else sent_by(rung.rung, rank, n, model, tokens, dict(rung.options))
        if right not in (None, found):
            return f"rank {rank} sends {found:,} bytes in a step, and the formula says {right:,}"
    return detectors.sent(it)


def held(it: Subject) -> str:
    """After a step every rank holds the bytes of its page's formula, and at its most as much as it has to."""
    rung, n = it.found.rung, it.found.n
    for rank, found in enumerate(it.found["short"].kept):
        right = None if rung.on else held_by(rung.rung, rank, n, model_of(rung.model, 0), dict(rung.options))
        if right not in (None, found):
            return f"rank {rank} holds {found:,} bytes after a step, and the formula says {right:,}"
    return detectors.memory(it)


def placements(it: Subject) -> str:
    """Every use of a tensor takes its placement, before anything is sent."""
    rung = it.found.rung
    bound = lambda comm: load(rung, comm).train  # noqa: E731
    return lone_rank.check(bound, partial(model_of, rung.model, 0), **dict(rung.options))


DETECTORS: dict[str, Detector] = {
    **detectors.DETECTORS,
    "bytes": sent,
    "memory": held,
    "resume": resume,
    "placements": placements,
}


def subject(rung: Mistake, n: int = 2, seed: int = 0) -> Subject:
    """Return a rung's trainings on n ranks with its changed lines, and what they have to equal."""
    right = replace(rung, name="", kind="", symptom="", case="", diff="")
    n = 1 if rung.rung in ("one_process", "low_precision") else n
    return Subject(Trainings(rung, n, seed), alone(right, n, seed), unchanged(right, n, seed))


def examine(rung: Mistake, names: Sequence[str] = tuple(DETECTORS)) -> dict[str, Found]:
    """Ask detectors about a rung with its changed lines."""
    return ask(subject(rung), {name: DETECTORS[name] for name in names}, alone=("order", "placements"))
