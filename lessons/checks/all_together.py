"""Checks of lesson 15: places of ranks, memory and bytes of a layout, the choice of one, and checkpoints."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

import minidist as md
from checks.exercises import Answer, Lesson
from checks.training import BATCH, ROWS, Training
from checks.verdicts import Right, Score, compare, number, wrong
from minidist.scale.memory import estimate

lesson = Lesson(15, "all_together")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

AXES = ("pp", "dp", "cp", "tp")
AFTER = 13
"""Steps that a resumed training is followed for: more than two epochs."""


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
                wrong(f"place({rank}, {_short(layout)}) is {got!r}, and should be (pp, dp, cp, tp).")
            if tuple(got) != tuple(grid[rank].tolist()):
                wrong(
                    f"place({rank}, {_short(layout)}), as (pp, dp, cp, tp), is wrong.",
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
                call = f'group({rank}, "{axis}", {_short(layout)})'
                if not isinstance(got, (list, tuple, range)):
                    wrong(f"{call} is {got!r}, and should be a list of ranks.")
                if list(got) != expected:
                    wrong(f"{call} is wrong.", f"  expected {expected}", f"  got      {list(got)}")
                tried += 1
    return Right(tried)


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
    for layout in _layouts(draw):
        parameters = 10**9 if tried < 3 else int(draw.integers(10**7, 10**10))
        if layout.tp == layout.pp == layout.cp == 1:  # as minidist itself reckons
            expected = float(estimate(parameters, layout).total)
        else:
            expected = _state_bytes(parameters, layout)
        got = answer(parameters, layout)
        compare(got, expected, f"memory({parameters}, {_short(layout)})", rtol=1e-5)
        tried += 1
    return Right(tried)


def _state_bytes(parameters: float, layout: md.Layout) -> float:
    """By the formulas of the ZeRO paper, of a part of the model."""
    own, shared = parameters / layout.tp / layout.pp, layout.dp * layout.cp
    each = (4, 4, 8) if layout.precision == "fp32" else (2, 2, 12)
    stages = (3, 2, 1)
    return sum(own * b / (shared if layout.zero >= s else 1) for b, s in zip(each, stages, strict=True))


@lesson.exercise(
    "15.4",
    hints=(
        "Each of the three is known from an earlier lesson: 9 and 13 (dp), 12 (tp), 11 (pp). An axis of one "
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
    for layout in _layouts(draw):
        if layout.cp > 1:
            continue
        parameters, blocks = int(draw.integers(10**7, 10**10)), 12 * int(draw.integers(1, 9))
        activations = int(draw.integers(10**5, 10**8))
        call = f"bytes_per_step({_short(layout)}, {parameters}, {blocks}, {activations})"
        got = answer(layout, parameters, blocks, activations)
        if not isinstance(got, dict) or set(got) != {"dp", "tp", "pp"}:
            wrong(f'{call} is {got!r}, and should be a dict with the keys "dp", "tp" and "pp".')
        for axis, expected in _sent(layout, parameters, blocks, activations).items():
            if got[axis] is None:
                wrong(f'{call}["{axis}"] is None, and should be {number(expected)}.')
            compare(got[axis], expected, f'{call}["{axis}"]', rtol=1e-6)
        tried += 1
    return Right(tried)


def _sent(layout: md.Layout, parameters: float, blocks: int, activations: float) -> dict[str, float]:
    own = (4 if layout.precision == "fp32" else 2) * parameters / layout.tp / layout.pp
    dp, tp, pp = layout.dp, layout.tp, layout.pp
    return {
        "dp": (2 + (layout.zero == 3)) * (dp - 1) / dp * own,
        "tp": 8 * blocks / pp * (tp - 1) / tp * activations,
        "pp": [0, activations, 2 * activations][min(pp, 3) - 1],
    }


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
    cases = list(_choices(draw))
    for says, layouts, budget, needs, times in cases:
        counted: list[md.Layout] = []

        def seconds(layout: md.Layout, counted: list[md.Layout] = counted, times: Any = times) -> float:
            counted.append(layout)
            return float(times[layout])

        def need(layout: md.Layout, needs: Any = needs) -> float:
            return float(needs[layout])

        got = answer(list(layouts), budget, need, seconds)
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
                f"  expected {_named(expected)}",
                f"  got      {_named(got)}",
            )
        asked += len(counted)
        par += 0 if plain else len(fitting)
    idea = "ask for the seconds of those alone that fit, once each, and of none where the plain one fits"
    return Right(len(cases), (Score("Calls of seconds", asked, par, idea),))


def _choices(draw: np.random.Generator) -> Iterator[tuple[str, Any, float, Any, Any]]:
    """What is special, layouts, budget, and for each layout its need and its seconds."""
    few = [md.Layout(dp=4), md.Layout(dp=4, zero=1), md.Layout(dp=2, tp=2), md.Layout(pp=4)]
    yield "all fit", few, 100, dict(zip(few, (100, 60, 50, 20), strict=True)), _as(few, 9, 8, 3, 2)
    yield "the plain one does not", few, 99, _as(few, 100, 60, 50, 20), _as(few, 1, 8, 3, 4)
    yield "none fits", few, 10, _as(few, 100, 60, 50, 20), _as(few, 1, 8, 3, 4)
    yield "two are as fast", few, 60, _as(few, 100, 60, 50, 20), _as(few, 9, 3, 3, 4)
    yield "the smallest is slow", few, 60, _as(few, 100, 60, 50, 20), _as(few, 9, 8, 3, 7)
    yield "no layout at all", [], 60, {}, {}
    long = [md.Layout(dp=2, cp=2), md.Layout(dp=4, zero=1), md.Layout(tp=4)]
    yield "none of them is plain", long, 60, _as(long, 50, 40, 30), _as(long, 9, 8, 3)
    last = [md.Layout(tp=4), md.Layout(dp=2, zero=3), md.Layout(dp=4)]
    yield "the plain one is the last", last, 60, _as(last, 30, 40, 50), _as(last, 1, 2, 3)
    for _ in range(8):
        layouts = list(dict.fromkeys(layout for layout in _layouts(draw) if layout.precision == "fp32"))
        needs = {layout: float(draw.integers(1, 100)) for layout in layouts}
        yield "random numbers", layouts, 50, needs, {each: float(draw.integers(1, 9)) for each in layouts}


def _as(layouts: list[md.Layout], *values: float) -> dict[md.Layout, float]:
    return dict(zip(layouts, values, strict=True))


def _named(layout: Any) -> str:
    return _short(layout) if isinstance(layout, md.Layout) else repr(layout)


def _short(layout: md.Layout) -> str:
    """As the reader would write it."""
    return "Layout(" + str(layout).replace("precision=bf16", 'precision="bf16"').replace(",", ", ") + ")"


def _layouts(draw: np.random.Generator) -> Iterator[md.Layout]:
    """The plain ones first, one axis after the other, then all together."""
    yield from (md.Layout(), md.Layout(dp=4), md.Layout(dp=4, precision="bf16"))
    yield from (md.Layout(dp=4, zero=stage, precision=p) for p in ("fp32", "bf16") for stage in (1, 2, 3))
    yield from (md.Layout(tp=2), md.Layout(tp=4), md.Layout(pp=2), md.Layout(pp=3), md.Layout(pp=4))
    yield from (md.Layout(dp=2, cp=2, zero=1), md.Layout(dp=2, tp=2, pp=2), md.Layout(tp=2, pp=3))
    for _ in range(6):
        pp, dp, cp, tp = (int(size) for size in draw.integers(1, 5, 4))
        zero = int(draw.integers(0, 2 if pp > 1 else 4))
        precision = ("fp32", "bf16")[int(draw.integers(2))]
        yield md.Layout(pp=pp, dp=dp, cp=cp, tp=tp, zero=zero, precision=precision)


PIECES = {
    "model": "the weights",
    "optimizer": "the optimizer's state (AdamW's two averages, and how many steps they are of)",
    "steps": "run.steps, on which the learning rate depends",
    "order": "run.order, the rows of the epoch that are still to come",
    "random": "the state of torch's random numbers, from which dropout and the next epoch's order are drawn",
}


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
        scores = [_killed(answer, kill, int(draw.integers(10**6))) for kill in kills]
    finally:
        torch.set_rng_state(before)  # those of the notebook
    return Right(len(kills), (max(scores, key=lambda score: (score.over, score.par)),))


def _killed(answer: Answer, kill: int, seed: int) -> Score:
    """A run that is saved after `kill` steps, beside one that nobody kills."""
    run, keeper = Training(seed), answer()
    for _ in range(kill):
        run.step()
    was = _state(run)
    saved = _method(keeper, "save")(run)
    if not isinstance(saved, dict):
        wrong(f"save(run) is {saved!r:.60}, and should be a dict of what is saved.")
    if (disturbed := _gone(_state(run), was)) is not None:
        wrong(f"save(run) changes the run that it saves: {disturbed} is not as it was before.")
    written = _written(saved)
    expected = [run.step() for _ in range(AFTER)]
    _untouched(saved, torch.load(io.BytesIO(written), weights_only=True), "saved")
    new = Training(seed + 1)  # the old one is gone, and with it the process
    torch.manual_seed(seed + 2)
    _method(answer(), "load")(new, torch.load(io.BytesIO(written), weights_only=True))
    now = _state(new)
    losses = [new.step() for _ in range(AFTER)]
    end, right_end = _state(new), _state(run)
    first = next((i for i, pair in enumerate(zip(losses, expected, strict=True)) if pair[0] != pair[1]), None)
    if first is not None or not _same(end["model"], right_end["model"]):
        _tell(kill, first, losses, expected, was, now)
    return Score("Bytes saved", _bytes(saved), _bytes(was), "no more than the next steps read")


def _tell(
    kill: int,
    first: int | None,
    losses: list[float],
    expected: list[float],
    was: dict[str, Any],
    now: dict[str, Any],
) -> NoReturn:
    """WrongAnswer: the first step that differs, and what `load` did not bring back."""
    gone = _gone(now, was)
    lines = [f"The run was killed after {kill} steps and resumed from what you saved."]
    if first is not None:
        lines += [
            f"  loss of step {kill + first + 1} in the run that nobody killed: {expected[first]!r}",
            f"  loss of step {kill + first + 1} in the resumed run:            {losses[first]!r}",
        ]
    if gone is None:
        lines.append("All was there right after load, and yet the steps differ: what is not loaded in place?")
    else:
        lines.append(f"Not as it was before: {gone}.")
    wrong(*lines)


def _gone(now: dict[str, Any], was: dict[str, Any]) -> str | None:
    """The first piece that is not as it was, in words."""
    return next((words for piece, words in PIECES.items() if not _same(now[piece], was[piece])), None)


def _state(run: Training) -> dict[str, Any]:
    """A copy of all that counts."""
    return copy.deepcopy(
        {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "steps": run.steps,
            "order": run.order,
            "random": torch.get_rng_state(),
        }
    )


def _method(keeper: Any, name: str) -> Answer:
    """A method as an answer, so that its exceptions are told with the reader's line."""
    bound = getattr(keeper, name, None)
    if bound is None:
        wrong(f"Checkpoint has no method {name}; it needs save(self, run) and load(self, run, saved).")

    @functools.wraps(getattr(bound, "__func__", bound))
    def call(*args: Any) -> Any:
        return bound(*args)

    return Answer(f"Checkpoint().{name}", call)


def _written(saved: dict[str, Any]) -> bytes:
    """As a file would hold it."""
    file = io.BytesIO()
    try:
        torch.save(saved, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError, RuntimeError):
        wrong(
            "What save(run) returned can't be read back from a file: let it hold tensors, numbers, text, "
            "lists and dicts alone, and no model or optimizer itself (state_dict() gives what they hold)."
        )
    return file.getvalue()


def _untouched(now: Any, then: Any, name: str) -> None:
    """WrongAnswer where what was saved has changed since."""
    if isinstance(then, dict):
        for key in then:
            _untouched(now.get(key), then[key], f"{name}[{key!r}]")
    elif isinstance(then, (list, tuple)):
        for index, each in enumerate(then):
            _untouched(now[index] if index < len(now) else None, each, f"{name}[{index}]")
    elif not _same(now, then):
        wrong(
            f"What was saved changes while the run goes on: {name} has another value {AFTER} steps later. "
            "A state_dict() holds the run's own tensors: save a copy of them."
        )


def _same(a: Any, b: Any) -> bool:
    """Equal to the bit."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(b, dict):
        return isinstance(a, dict) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in b)
    if isinstance(b, (list, tuple)):
        return (
            isinstance(a, (list, tuple))
            and len(a) == len(b)
            and all(_same(x, y) for x, y in zip(a, b, strict=True))
        )
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


def _bytes(saved: Any) -> int:
    """Of all tensors in it."""
    if isinstance(saved, Tensor):
        return saved.nbytes
    if isinstance(saved, dict):
        return sum(map(_bytes, saved.values()))
    return sum(map(_bytes, saved)) if isinstance(saved, (list, tuple)) else 0
