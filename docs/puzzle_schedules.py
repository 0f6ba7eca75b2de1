"""The judge of the puzzle "schedule golf": the shortest schedule within a budget of live activations.

The page runs this file in the browser, by Pyodide. A solution is the playground's text. `schedules.check`
proves it, and `schedules.simulate` is the score: no timer is involved. A pass through all layers of a rank
takes 1 s forward, 1 s for the gradients of its inputs and 1 s for those of its weights; messages take none.
With two chunks a rank, a pass takes half of that, and a live pass holds half the activations.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import playground

from minidist.parallel import schedules
from minidist.parallel.schedules import Instruction, StagePlacement
from minidist.parallel.schedules.instructions import Schedule, sizes

MOST_CHUNKS = 2
PASSES = ("forward", "backward_input", "backward_weight")
TITLES = {"zero_bubble": "ZB-H1"}  # the paper's name, beside those of the records
V_ORDER = {"f": "forward", "i": "backward_input", "w": "backward_weight"}


@dataclass(frozen=True)
class Hole:
    """A pipeline, and how many micro-batches' activations a rank may hold."""

    title: str
    ranks: int
    micro_batches: int
    budget: float  # micro-batches, through all of a rank's layers
    v: tuple[str, tuple[int, ...]]  # of its V schedule: what a rank prefers, and how much each keeps free

    @property
    def story(self) -> str:
        """The hole in a sentence."""
        return (
            f"{self.ranks} ranks, {self.micro_batches} micro-batches, and no rank may hold the activations "
            f"of more than {self.budget:g} of them."
        )


HOLES = {
    "first": Hole("Two ranks", 2, 4, 2, ("i0 f1 f0 i1 w1 w0", (2, 1))),
    "four": Hole("As much as 1F1B holds", 4, 6, 4, ("f1 i0 w0 f0 i1 w1", (0, 1, 1, 1))),
    "three": Hole("Three quarters of it", 4, 6, 3, ("i1 f1 i0 w0 w1 f0", (2, 0, 2, 0))),
    "two": Hole("Half of it", 4, 6, 2, ("i1 f1 w0 i0 f0 w1", (1, 0, 0, 0))),
}


def choices() -> str:
    """The holes with their stories and marks: each a schedule's name, text, seconds, and what ranks hold."""
    told = {}
    for name, hole in HOLES.items():
        marks = [
            [title, *score(made), playground.write(made, False)] for title, made in marks_of(hole).items()
        ]
        told[name] = {"title": hole.title, "story": hole.story, "budget": hole.budget, "marks": marks}
    return json.dumps(told)


def answer(request: str) -> str:
    """Judge the text of a request, {"hole": name, "text": a schedule}.

    The answer is the playground's, with its drawing. A schedule of this hole also has "score": seconds, the
    share of the time that ranks wait, and the micro-batches that the fullest holds; "verdict"; and "fits",
    whether it is within the budget.
    """
    asked = json.loads(request)
    hole = HOLES[asked["hole"]]
    asked |= {"schedule": "", "times": seconds(asked["text"]), "messages": False, "rewrite": False}
    said: dict[str, Any] = json.loads(playground.answer(json.dumps(asked)))
    if "error" not in said and (fault := other_hole(hole, said["sizes"])):
        said["error"] = fault
    if "error" not in said:
        found = score(playground.read(asked["text"]))
        said["score"], said["fits"] = found, found[2] <= hole.budget
        said["verdict"] = verdict(hole, *found)
    return json.dumps(said)


def seconds(text: str) -> dict[str, float]:
    """The times of a text's passes: those through half of a rank's layers take half as long."""
    try:
        chunks = sizes(playground.read(text))[2]
    except ValueError:
        chunks = 1
    return dict.fromkeys(PASSES, 1 / max(chunks, 1))


def other_hole(hole: Hole, found: tuple[int, int, int]) -> str:
    """What is wrong with the sizes of a schedule; "" for nothing."""
    ranks, micro_batches, chunks = found
    if (ranks, micro_batches) != (hole.ranks, hole.micro_batches):
        return (
            f"the schedule is for {ranks} ranks and {micro_batches} micro-batches; this hole has "
            f"{hole.ranks} ranks and {hole.micro_batches} micro-batches"
        )
    return f"the schedule has {chunks} chunks a rank; a rank's layers are cut at most in two" * (
        chunks > MOST_CHUNKS
    )


def score(schedule: Schedule) -> tuple[float, float, float]:
    """Seconds, the share of the time that ranks wait, and the micro-batches that the fullest rank holds."""
    chunks = sizes(schedule)[2]
    found = schedules.simulate(schedule, dict.fromkeys(PASSES, 1 / chunks))
    return found.seconds, found.bubble, max(found.peak_activations) / chunks


def verdict(hole: Hole, took: float, bubble: float, held: float) -> str:
    """A score in words: over the budget, or which marks it beats."""
    said = (
        f"Proved: it ends, in {took:g} s; ranks wait for {bubble:.1%} of it, and the fullest holds {held:g}"
    )
    if held > hole.budget:
        return (
            f"{said} micro-batches. That is over the budget of {hole.budget:g}: run a backward pass earlier."
        )
    marks = {title: score(made) for title, made in marks_of(hole).items()}
    allowed = {f"{title} ({mark[0]:g} s)": mark[0] for title, mark in marks.items() if mark[2] <= hole.budget}
    groups = {
        "Shorter than": [title for title, mark in allowed.items() if took < mark],
        "As short as": [title for title, mark in allowed.items() if took == mark],
        "Not yet as short as": [title for title, mark in allowed.items() if took > mark],
    }
    against = [f"{what} {', '.join(titles)}." for what, titles in groups.items() if titles]
    return f"{said} micro-batches. {' '.join(against)}"


@cache
def marks_of(hole: Hole) -> dict[str, Schedule]:
    """The schedules to beat, also those that are over the hole's budget."""
    made: dict[str, Schedule] = {
        TITLES.get(name, kind.title): schedules.by_name(name, hole.ranks, hole.micro_batches)
        for name, kind in schedules.SCHEDULES.items()
        if kind.takes_chunks(1)
    }
    return {**made, "V": v_schedule(hole)}


def v_schedule(hole: Hole) -> Schedule:
    """A schedule whose stages go down the ranks and up again, so that rank 0 has the first and the last.

    In each step a rank runs the first pass of its order whose input is there, unless a forward pass would
    exceed the budget; through its first chunk already when it has not left as much free as `hole.v` says.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", on V-shaped placements.
    """
    ranks, last = hole.ranks, 2 * hole.ranks - 1
    placement = StagePlacement([[rank, last - rank] for rank in range(ranks)])
    order = [(V_ORDER[each[0]], int(each[1])) for each in hole.v[0].split()]
    done: dict[tuple[str, int], int] = dict.fromkeys(
        ((kind, s) for kind in PASSES for s in range(last + 1)), 0
    )
    live, made = [0] * ranks, [[] for _ in range(ranks)]

    def ready(rank: int, kind: str, chunk: int) -> bool:
        stage = placement.stages[rank][chunk]
        i = done[kind, stage]
        if kind == "forward":
            free = 2 * hole.budget - live[rank] - (hole.v[1][rank] if chunk == 0 else 0)
            before = done[kind, stage - 1] if stage else hole.micro_batches
            return i < before and free > 0
        if kind == "backward_weight":
            return i < done["backward_input", stage]
        after = done[kind, stage + 1] if stage < last else hole.micro_batches
        return i < min(done["forward", stage], after)

    while sum(map(len, made)) < 6 * ranks * hole.micro_batches:
        now = [next((each for each in order if ready(rank, *each)), None) for rank in range(ranks)]
        for rank, found in enumerate(now):
            if found is not None:
                kind, chunk = found
                stage = placement.stages[rank][chunk]
                made[rank].append(Instruction(kind, done[kind, stage], chunk))
                done[kind, stage] += 1
                live[rank] += (kind == "forward") - (kind == "backward_weight")
    return schedules.with_messages(made, placement)
