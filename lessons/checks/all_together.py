"""Checks of lesson 15: places of ranks, memory and bytes of a layout, the choice of one, and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import minidist as md
from checks.support.exercises import Answer, Lesson
from checks.support.layouts_to_try import bytes_sent, choices, layouts_to_try, named, short, state_bytes
from checks.support.resumed_runs import resume
from checks.support.verdicts import Right, Score, compare, number, wrong
from checks.training import BATCH, ROWS

lesson = Lesson(15, "all_together")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

AXES = ("pp", "dp", "cp", "tp")


@lesson.exercise(
    "15.1",
    hints=(
        "Think of a clock: from the seconds since midnight it shows hours, minutes and seconds. Here tp are "
        "the seconds: they change from each rank to the next.",
        "rank % layout.tp is the tp coordinate, and rank // layout.tp counts what is left: whole groups of "
        "tp ranks. The same again with cp, then with dp; what remains is pp.",
        "rank, tp = divmod(rank, layout.tp), then rank, cp = divmod(rank, layout.cp), then pp, dp = "
        "divmod(rank, layout.dp); return pp, dp, cp, tp.",
    ),
)
def place(answer: Answer, draw: np.random.Generator) -> Right:
    """A rank's coordinates in the grid."""
    sizes = [(1, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 1), (2, 1, 1, 1), (1, 1, 2, 1), (2, 2, 1, 2), (2, 3, 2, 2)]
    sizes += [tuple(int(size) for size in draw.integers(1, 5, 4)) for _ in range(4)]
    tried = 0
    for pp, dp, cp, tp in sizes:
        layout = md.Layout(pp=pp, dp=dp, cp=cp, tp=tp)
        grid = np.argwhere(np.ones((pp, dp, cp, tp)))  # in the order of ranks
        ranks = range(layout.ranks) if layout.ranks <= 24 else sorted(draw.choice(layout.ranks, 24, False))
        for rank in map(int, ranks):
            got = answer(rank, layout)
            if not isinstance(got, (tuple, list)) or len(got) != 4:
                wrong(f"place({rank}, {short(layout)}) is {got!r}, and should be (pp, dp, cp, tp).")
            _whole(got, f"place({rank}, {short(layout)})")
            if tuple(got) != tuple(grid[rank].tolist()):
                wrong(
                    f"place({rank}, {short(layout)}), as (pp, dp, cp, tp), is wrong.",
                    f"  expected {tuple(grid[rank].tolist())}",
                    f"  got      {tuple(got)}",
                )
            tried += 1
    return Right(tried)


@lesson.exercise(
    "15.2",
    hints=(
        "You need no arithmetic: you have place, and may go through all ranks. Which are in the group?",
        "Those whose coordinates are the same as this rank's on the three other axes. The axes stand in a "
        'tuple, ("pp", "dp", "cp", "tp"), in the order of place, so that zip puts names and coordinates '
        "together.",
        "Write others(r), a list of r's coordinates without that of `axis`: [at for name, at in zip(AXES, "
        "place(r, layout)) if name != axis]; then return [r for r in range(layout.ranks) if others(r) == "
        "others(rank)].",
    ),
)
def group(answer: Answer, draw: np.random.Generator) -> Right:
    """The ranks that differ from one along one axis alone."""
    sizes = [(1, 1, 1, 2), (1, 2, 1, 1), (1, 1, 1, 1), (2, 2, 1, 2), (2, 3, 2, 2)]
    sizes += [tuple(int(size) for size in draw.integers(1, 4, 4)) for _ in range(3)]
    tried = 0
    for pp, dp, cp, tp in sizes:
        layout = md.Layout(pp=pp, dp=dp, cp=cp, tp=tp)
        grid = np.arange(layout.ranks).reshape(pp, dp, cp, tp)
        for rank in sorted({0, layout.ranks - 1, int(draw.integers(layout.ranks))}):
            at = np.argwhere(grid == rank)[0].tolist()
            for number_of, axis in enumerate(AXES):
                expected = grid[
                    tuple(slice(None) if i == number_of else a for i, a in enumerate(at))
                ].tolist()
                got = answer(rank, axis, layout)
                call = f'group({rank}, "{axis}", {short(layout)})'
                if not isinstance(got, (list, tuple, range)):
                    wrong(f"{call} is {got!r}, and should be a list of ranks.")
                _whole(got, call)
                if list(got) != expected:
                    wrong(f"{call} is wrong.", f"  expected {expected}", f"  got      {list(got)}")
                tried += 1
    return Right(tried)


def _whole(got: Sequence[Any], call: str) -> None:
    """WrongAnswer for 2.0, which equals 2 and is the number of no rank."""
    for each in got:
        if not isinstance(each, (int, np.integer)):
            wrong(f"{call} has {each!r}, and should have whole numbers: / gives a float, // an int.")


@lesson.exercise(
    "15.3",
    hints=(
        "Begin with dp alone and zero=0: 16 bytes for each parameter, whatever dp is. Then ask of each axis "
        "what it divides.",
        "tp and pp cut the model: a rank has parameters / (tp * pp) of them. ZeRO shares what dp * cp ranks "
        "have in common: stage 1 divides the optimizer's bytes by that, 2 the gradients' too, 3 all.",
        "own = parameters / (layout.tp * layout.pp) and n = layout.dp * layout.cp; then return own * (weight "
        "/ (n if layout.zero >= 3 else 1) + gradient / (n if layout.zero >= 2 else 1) + state / (n if "
        'layout.zero >= 1 else 1)), where weight, gradient, state = (4, 4, 8) if layout.precision == "fp32" '
        "else (2, 2, 12).",
    ),
)
def memory(answer: Answer, draw: np.random.Generator) -> Right:
    """Bytes of the training's state on one rank."""
    tried = 0
    for layout in layouts_to_try(draw):
        # No number of elements that ranks could share evenly, so that rounding shows.
        few = int(draw.integers(50, 100)) * 2 * layout.ranks + 1
        for parameters in (10**9 if tried < 6 else int(draw.integers(10**7, 10**10)), few):
            got = answer(parameters, layout)
            expected = state_bytes(parameters, layout)
            compare(got, expected, f"memory({parameters}, {short(layout)})", rtol=1e-9)
            tried += 1
    return Right(tried)


@lesson.exercise(
    "15.4",
    hints=(
        "Each of the three is known from an earlier lesson: 9 and 14 (dp), 13 (tp), 12 (pp). An axis of one "
        "rank sends nothing: check your formula with 1.",
        "An all-reduce of S bytes among n ranks sends 2 (n - 1) / n S. With dp S is the bytes of this rank's "
        "gradients; ZeRO 3 has 3 in place of the 2. With tp S is `activations`, and there are 4 for each of "
        "blocks / pp blocks. With pp a stage sends `activations` once for each neighbour that it has.",
        'element = 4 if layout.precision == "fp32" else 2; gradients = element * parameters / (layout.tp * '
        'layout.pp). "dp": (3 if layout.zero == 3 else 2) * (dp - 1) / dp * gradients. "tp": 4 * blocks / pp '
        '* 2 * (tp - 1) / tp * activations. "pp": min(pp - 1, 2) * activations.',
    ),
)
def bytes_per_step(answer: Answer, draw: np.random.Generator) -> Right:
    """Bytes that a rank sends in a step, by axis."""
    tried = 0
    for layout in layouts_to_try(draw):
        if layout.cp > 1:
            continue
        parameters, blocks = int(draw.integers(10**7, 10**10)), 12 * int(draw.integers(1, 9))
        activations = int(draw.integers(10**5, 10**8))
        call = f"bytes_per_step({short(layout)}, {parameters}, {blocks}, {activations})"
        got = answer(layout, parameters, blocks, activations)
        if not isinstance(got, dict) or set(got) != {"dp", "tp", "pp"}:
            wrong(f'{call} is {got!r}, and should be a dict with the keys "dp", "tp" and "pp".')
        for axis, expected in bytes_sent(layout, parameters, blocks, activations).items():
            if got[axis] is None:
                wrong(f'{call}["{axis}"] is None, and should be {number(expected)}.')
            compare(got[axis], expected, f'{call}["{axis}"]', rtol=1e-6)
        tried += 1
    return Right(tried)


@lesson.exercise(
    "15.5",
    hints=(
        "First find out which fit: a list of them is one line. The rest asks only about that list.",
        "Plain data parallelism is a layout with tp, pp and cp of 1 and zero of 0. If one of those that fit "
        "is plain, it is the answer, however slow. If not, min(..., key=seconds) finds the fastest, and the "
        "first of several that are as fast.",
        "fitting = [layout for layout in layouts if need(layout) <= budget]; for layout in fitting: if "
        "layout.tp == layout.pp == layout.cp == 1 and layout.zero == 0: return layout; and at the end return "
        "min(fitting, key=seconds, default=None).",
    ),
)
def choose(answer: Answer, draw: np.random.Generator) -> Right:
    """The simplest layout if it fits, else the fastest that does."""
    asked, par = 0, 0
    cases = list(choices(draw))
    for says, layouts, budget, needs, times in cases:
        counted: list[md.Layout] = []

        def seconds(layout: md.Layout, counted: list[md.Layout] = counted, times: Any = times) -> float:
            counted.append(layout)
            return float(times[layout])

        def need(layout: md.Layout, needs: Any = needs) -> float:
            return float(needs[layout])

        given = list(layouts)
        got = answer(given, budget, need, seconds)
        fitting = [layout for layout in layouts if needs[layout] <= budget]
        plain = [layout for layout in fitting if layout.tp * layout.pp * layout.cp == 1 and not layout.zero]
        expected = plain[0] if plain else min(fitting, key=times.__getitem__, default=None)
        if got != expected:
            table = [
                f"  {layout!s:22} needs {number(needs[layout])}, takes {number(times[layout])} s"
                + ("" if needs[layout] <= budget else ", does not fit")
                for layout in layouts
            ]
            wrong(
                f"Of these layouts, with a budget of {number(budget)} ({says}):",
                *table,
                f"  expected {named(expected)}",
                f"  got      {named(got)}",
            )
        answer.unchanged(f"choose(layouts, {budget}, need, seconds)", (layouts,), (given,))
        asked += len(counted)
        par += 0 if plain else len(fitting)
    idea = "ask for the seconds of those alone that fit, once each, and of none where the plain one fits"
    return Right(len(cases), (Score("Calls of seconds", asked, par, idea),))


@lesson.exercise(
    "15.6",
    hints=(
        "Read Training.step once more, line by line, and ask of each name: where does its value come from? "
        "Five things are read that an earlier step changed. One of them is not an attribute of the run.",
        "model and optimizer have state_dict() and load_state_dict(). steps and order are plain attributes. "
        "The random numbers: torch.get_rng_state() and torch.set_rng_state(state). And state_dict() gives "
        "the tensors themselves, which the next step changes: copy them.",
        'save: return copy.deepcopy({"model": run.model.state_dict(), "optimizer": '
        'run.optimizer.state_dict(), "steps": run.steps, "order": run.order, "random": '
        'torch.get_rng_state()}). load: load_state_dict for the first two, then run.steps = saved["steps"], '
        'run.order = saved["order"], torch.set_rng_state(saved["random"]).',
    ),
)
def Checkpoint(answer: Answer, draw: np.random.Generator) -> Right:
    """A training that is killed goes on to the same bits."""
    before = torch.get_rng_state()
    try:
        kills = (4, 0, 1, ROWS // BATCH, int(draw.integers(7, 40)))
        bytes_saved = [resume(answer, kill, int(draw.integers(10**6))) for kill in kills]
    finally:
        torch.set_rng_state(before)  # those of the notebook
    scores = [Score("Bytes saved", *each, "no more than the next steps read") for each in bytes_saved]
    return Right(len(kills), (max(scores, key=lambda score: (score.over, score.par)),))
