"""`load`: continue a training from a checkpoint, on any number of ranks.

It checks the files, then whether they fit this model, optimizer, scheduler and order of rows, and then fills
the engine. Until all checks have passed, on every rank, nothing of the engine changes.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidist import comm
from minidist.checkpoint import folders
from minidist.checkpoint.errors import CheckpointError, DamagedCheckpoint, agree
from minidist.checkpoint.index import Index, MappedFiles, read_index, stored_names, verify
from minidist.checkpoint.resharding import overlaps
from minidist.checkpoint.state import (
    Scheduler,
    buffer_names,
    classes,
    own_name,
    random_name,
    sampler_settings,
    set_random_state,
)
from minidist.checkpoint.values import decode
from minidist.model.sampler import Sampler
from minidist.parallel.contract.tensor_boxes import TensorBox
from minidist.parallel.contract.training_state import by_name_and_key, load_extra_state
from minidist.parallel.engine.training_step import Engine, check_engine
from minidist.parallel.flat.ranges import narrowed
from minidist.parallel.sharding import state_by_name

_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
"""Keys that schedulers add to an optimizer's groups."""


class Loaded(NamedTuple):
    """The contents of a loaded checkpoint besides the engine's state."""

    path: Path
    step: int  # steps done when it was saved, and so the next step of the sampler
    extra: Any
    ranks: int  # that saved it


def load(
    engine: Engine,
    path: str | os.PathLike[str],
    *,
    latest: bool = False,
    scheduler: Scheduler | None = None,
    sampler: Sampler | None = None,
) -> Loaded:
    """Load a checkpoint into an engine. It may come from any number of ranks and any ZeRO stage.

    >>> loaded = md.load(engine, "runs/digits", latest=True, sampler=sampler)
    >>> for step in range(loaded.step, 1000): ...

    Every rank calls it, with an engine for the same model and optimizer. Under the layout that saved it, the
    training continues bit for bit as if it had never stopped. Under another layout it does to rounding, and a
    rank takes the random states saved for its number, or keeps its own if there are none. Numbers are
    converted to the engine's dtype. Options of the optimizer's groups, such as lr, become the saved ones, as
    with torch's `load_state_dict`; change them afterwards. Nothing from the files is executed.

    An asynchronous save of this engine that is under way is waited for first; if it fails, `load` warns of
    it. Every file is read once to check it, each by one rank, before anything of the engine changes. Then
    each rank reads its own part. Sends the names and shapes of the model's tensors.

    Args:
        engine: what `md.prepare` returned.
        path: the checkpoint's directory; with `latest`, a folder of them.
        latest: take the whole checkpoint that was saved last, whatever its step. Rank 0 warns of each one
            that it passes over, and says why.
        scheduler: as in `save`; takes its state.
        sampler: as in `save`; is compared with the saved one.

    Returns:
        The step, `extra`, and which checkpoint it was.

    Raises:
        DamagedCheckpoint: a file, which the message names, is missing, cut short or altered. The engine is
            unchanged.
        CheckpointError: there is no checkpoint; or it has another version, or belongs to another model,
            optimizer or scheduler, whose first difference is named. The engine is unchanged. The same on all
            ranks.
        CollectiveError: a peer is gone or late.
        ValueError: the sampler deals rows in another order, or a sampler or scheduler is given and none was
            saved.
    """
    check_engine(engine)
    if engine.saving is not None:
        try:
            engine.saving.wait()
        except Exception as error:  # the same on all ranks; a whole checkpoint can still be loaded
            if comm.rank() == 0:
                warnings.warn(f"an earlier save failed: {error}", stacklevel=2)
    path = Path(os.path.realpath(path))
    found, *_ = agree(
        lambda: folders.checkpoints(path) if latest else [folders.standing(path)], f"read {path}"
    )
    if not found:
        raise CheckpointError(
            f"there is no checkpoint in {path}; save one with step=, or give another folder"
        )
    passed: list[str] = []
    for candidate in found:
        try:
            index = _checked(candidate)
        except DamagedCheckpoint as damage:
            if not latest:
                raise
            passed.append(str(damage))
            if comm.rank() == 0:
                warnings.warn(f"passed over a checkpoint: {damage}", stacklevel=2)
            continue
        return _load(engine, index, scheduler, sampler)
    raise DamagedCheckpoint(f"no checkpoint in {path} is whole: {'; '.join(passed)}")


def _checked(path: Path) -> Index:
    """Return a checkpoint's index if it is whole. Each rank reads a share of the files."""
    own: list[Index] = []

    def check() -> None:
        index = read_index(path)
        verify(index, sorted(index.files)[comm.rank() :: comm.size()])
        own.append(index)

    agree(check, f"read {path}")
    return own[0]


def _load(engine: Engine, index: Index, scheduler: Scheduler | None, sampler: Sampler | None) -> Loaded:
    """Load everything from a whole checkpoint, if it fits."""
    doing = f"load {index.path}"
    facts: dict[str, Any] = {}
    agree(lambda: facts.update(_decoded(index)), doing)
    own = (box for box in engine.state_boxes() if box.name.startswith("model."))
    everyones = agree(lambda: {box.name.partition(".")[2]: box.shape for box in own}, doing)
    here = {name: shape for shapes in everyones for name, shape in shapes.items()}

    def fits() -> None:
        _check_model(index, here)
        _check_classes(index.path, classes(engine, scheduler), facts.get("classes"))
        _check_optimizer(index.path, engine.state_settings(), facts["settings"])
        for what, given in (("sampler", sampler), ("scheduler", scheduler)):
            if given is not None and facts[what] is None:
                raise ValueError(
                    f"{index.path} was saved without a {what}; load it without, or save one with it"
                )
        if sampler is not None:
            _check_sampler(index.path, sampler, facts["sampler"])

    agree(fits, doing)
    state = by_name_and_key((name, (each.shape, each.dtype)) for name, each in index.tensors.items())
    agree(lambda: engine.load_state_settings(facts["settings"], state), doing)
    drawn = _fill(engine, index, doing)
    state_by_name.loaded(engine.strategy)

    def rest() -> None:
        engine.load_settings(facts["engine"])
        load_extra_state(engine.model, facts.get("extra_state", {}))
        if scheduler is not None:
            scheduler.load_state_dict(facts["scheduler"])
        if drawn is not None:
            set_random_state(drawn)

    agree(rest, doing)
    return Loaded(index.path, facts["step"], facts["extra"], facts["ranks"])


def _check_model(index: Index, here: dict[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError for the first difference between the saved model and this one."""
    saved = {name: stored.shape for name, stored in stored_names(index.tensors, "model").items()}
    for name in [*saved, *here]:
        mine, theirs = here.get(name), saved.get(name)
        if mine == theirs or 0 in (mine or theirs or ()):
            continue
        described = "no such tensor" if mine is None else f"shape {mine}"
        there = "no such tensor" if theirs is None else f"shape {theirs}"
        raise CheckpointError(
            f"{index.path} is of another model: of {name} it has {there}, and the engine's model has "
            f"{described}; prepare the model that was saved"
        )


def _check_classes(path: Path, here: dict[str, str | None], saved: dict[str, str | None] | None) -> None:
    """Raise CheckpointError for a different optimizer or scheduler. Older checkpoints do not name theirs."""
    for what, theirs in (saved or {}).items():
        mine = here[what]
        if None not in (mine, theirs) and mine != theirs:
            raise CheckpointError(
                f"{path} is of another {what}: it was saved with {theirs}, and is loaded with {mine}; give "
                f"the {what} that was saved"
            )


def _check_optimizer(path: Path, here: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raise CheckpointError if the optimizer's groups have other settings than the saved ones."""
    for number, (mine, theirs) in enumerate(zip(here["groups"], saved["groups"], strict=False)):
        different = ({*mine} ^ {*theirs}) - _OF_SCHEDULERS
        if different:
            name = min(different)
            has, lacks = ("it", "the engine's") if name in theirs else ("the engine's", "it")
            raise CheckpointError(
                f"{path} is of another optimizer: {has} has {name!r} in its group {number}, and {lacks} "
                "has none; prepare the optimizer that was saved"
            )


def _check_sampler(path: Path, sampler: Sampler, saved: dict[str, Any]) -> None:
    """Raise ValueError if the sampler deals rows in another order than the saved one."""
    for name, mine in sampler_settings(sampler).items():
        if mine != saved[name]:
            raise ValueError(
                f"the sampler has {name}={mine} and that of {path} had {saved[name]}, so rows would come in "
                "another order; give the sampler that was saved"
            )


def _fill(engine: Engine, index: Index, doing: str) -> Tensor | None:
    """Fill the engine's tensors, and return this rank's random states, if any were saved."""
    rank, files = comm.rank(), MappedFiles(index.path)
    name = random_name(rank)
    stored = index.tensors.get(name)
    drawn = None if stored is None else torch.empty(stored.shape, dtype=stored.dtype)
    parts: list[Any] = []

    def find() -> None:
        boxes, buffers = [*engine.state_boxes()], buffer_names(engine)
        if comm.size() == index.facts["ranks"]:  # a rank takes its own buffers again
            own = {each: own_name(rank, each) for each in buffers}
            boxes = [
                box._replace(name=own[box.name]) if own.get(box.name) in index.tensors else box
                for box in boxes
            ]
        if drawn is not None:
            boxes.append(TensorBox(name, tuple(drawn.shape), (0,), drawn))
        parts.extend(overlaps(index, boxes))

    def copy() -> None:
        for target, tensor, box, offsets in parts:
            target.copy_(narrowed(files.box(tensor, box), offsets, target.shape))

    agree(find, doing)
    agree(copy, doing)
    return drawn


def _decoded(index: Index) -> dict[str, Any]:
    try:
        return {name: decode(value) for name, value in index.facts.items()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise DamagedCheckpoint(f"the settings in {index.path} cannot be read: {error}") from None
