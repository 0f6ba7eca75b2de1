"""A run that is killed and resumed from what the reader's Checkpoint saved, beside one that nobody kills."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
from typing import Any, NoReturn

import torch
from torch import Tensor

from checks.support.exercises import Answer
from checks.support.verdicts import wrong
from checks.training import Training

AFTER = 13
"""Steps that a resumed training is followed for: more than two epochs."""

PIECES = {
    "model": "the weights, or BatchNorm's averages (model.state_dict() has both)",
    "optimizer": "the optimizer's state (AdamW's two averages, and how many steps they are of)",
    "steps": "run.steps, on which the learning rate depends",
    "order": "run.order, the rows of the epoch that are still to come",
    "random": "the state of torch's random numbers, from which dropout and the next epoch's order are drawn",
}


def resume(answer: Answer, kill: int, seed: int) -> tuple[int, int]:
    """Compare a run that is saved after `kill` steps, and resumed, with one that nobody kills.

    Returns the bytes of the tensors that were saved, and those that the next steps read.

    Raises:
        WrongAnswer: the two differ, or what was saved would not outlive the process.
    """
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
    _method(answer(), "save")(other := Training(seed + 3))  # what a class or a global kept is of this one now
    new = Training(seed + 1)  # the old one is gone, and with it the process
    torch.manual_seed(seed + 2)
    _method(answer(), "load")(new, torch.load(io.BytesIO(written), weights_only=True))
    now = _state(new)
    if _same(now["model"], _state(other)["model"]):
        wrong(
            "load(run, saved) brings back another run, which was saved later: it reads a global or a class.",
            "  A new process has neither. All that load needs has to be in what save returned.",
        )
    losses = [new.step() for _ in range(AFTER)]
    end, right_end = _state(new), _state(run)
    first = next((i for i, pair in enumerate(zip(losses, expected, strict=True)) if pair[0] != pair[1]), None)
    if first is not None or not _same(end["model"], right_end["model"]):
        _tell(kill, first, losses, expected, was, now)
    return _bytes(saved), _bytes(was)


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
