"""`load`: a training goes on where a checkpoint left it, on as many ranks as there are now."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidist import comm
from minidist.checkpoint import folders
from minidist.checkpoint.errors import CheckpointError, DamagedCheckpoint, agree
from minidist.checkpoint.fitting import (
    check_classes,
    check_model,
    check_optimizer,
    check_sampler,
    model_shapes,
)
from minidist.checkpoint.index import Index, read_index, verify
from minidist.checkpoint.random_state import set_random_state
from minidist.checkpoint.saving import check_engine
from minidist.checkpoint.state import (
    Scheduler,
    classes,
    optimizer_state,
)
from minidist.checkpoint.values import decode
from minidist.model.sampler import Sampler
from minidist.parallel.contract.engine import Engine
from minidist.parallel.engine.training_step import HybridEngine


@dataclass(frozen=True)
class Loaded:
    """What was loaded, beside the state that the engine has now."""

    path: Path
    step: int  # steps done when it was saved: the next that the sampler is asked for
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
    """Load a checkpoint into an engine, saved on any number of ranks and under any ZeRO stage.

    >>> loaded = md.load(engine, "runs/digits", latest=True, sampler=sampler)
    >>> for step in range(loaded.step, 1000): ...

    Every rank calls it, with an engine made for the same model and optimizer. Under the layout that saved it
    the training goes on bit for bit as if it had never stopped; under others to rounding, and a rank then
    takes the random states that were saved of its number, or keeps its own where there are none. Numbers are
    converted to the engine's dtype. Options of the optimizer's groups, such as lr, become the saved ones, as
    with torch's `load_state_dict`; change them afterwards. Nothing from the files is executed.

    An asynchronous save of this engine that is under way is waited for; where it fails, that is a warning
    here. Every file is read once to be checked, each by one rank, before anything of the engine is changed;
    then each rank reads its own part. Sent are the names and shapes of the model's tensors.

    Args:
        engine: of `md.prepare`.
        path: the checkpoint's directory; with `latest`, a folder of them.
        latest: take the one saved last of those that are whole, whatever its step; rank 0 warns of each that
            was passed over, and why.
        scheduler: as in `save`; takes its state.
        sampler: as in `save`; is compared with the saved one.

    Returns:
        The step, `extra`, and which checkpoint it was.

    Raises:
        DamagedCheckpoint: a file is missing, cut short or altered; names it. The engine is unchanged.
        CheckpointError: no checkpoint there, another version of the format, or one of another model or
            optimizer or scheduler, whose first difference is named; the engine is unchanged. The same on all
            ranks.
        CollectiveError: a peer is gone or late.
        ValueError: the sampler deals rows in another order, or a sampler or scheduler is given and none was
            saved.
    """
    hybrid = check_engine(engine)
    if hybrid.saving is not None:
        try:
            hybrid.saving.wait()
        except Exception as error:  # the same on all ranks, and no reason not to load what is whole
            if comm.rank() == 0:
                warnings.warn(f"an earlier save failed: {error}", stacklevel=2)
    path = Path(os.path.realpath(path))
    found = agree(lambda: folders.checkpoints(path) if latest else [folders.standing(path)], f"read {path}")[
        0
    ]
    if not found:
        raise CheckpointError(
            f"there is no checkpoint in {path}; save one with step=, or give another folder"
        )
    passed: list[str] = []
    for candidate in found:
        try:
            index = _checked(hybrid, candidate)
        except DamagedCheckpoint as damage:
            if not latest:
                raise
            passed.append(str(damage))
            if comm.rank() == 0:
                warnings.warn(f"passed over a checkpoint: {damage}", stacklevel=2)
            continue
        return _load(hybrid, index, scheduler, sampler)
    raise DamagedCheckpoint(f"no checkpoint in {path} is whole: {'; '.join(passed)}")


def _checked(engine: HybridEngine, path: Path) -> Index:
    """A checkpoint's index, where it is whole; each rank reads a share of the files."""

    def check() -> Index:
        index = read_index(path)
        verify(index, sorted(index.files)[comm.rank() :: comm.size()])
        return index

    doing = f"read {path}"
    own: list[Index] = []
    agree(lambda: own.append(check()), doing)
    (index,) = own
    return index


def _load(engine: HybridEngine, index: Index, scheduler: Scheduler | None, sampler: Sampler | None) -> Loaded:
    """Take everything from a checkpoint that is whole, where it fits."""
    doing = f"load {index.path}"
    facts: dict[str, Any] = {}
    agree(lambda: facts.update(_decoded(index)), doing)
    here: dict[str, tuple[int, ...]] = {}
    for each in agree(lambda: model_shapes(engine), doing):
        here |= each

    def fits() -> None:
        check_model(index, here)
        check_classes(index.path, classes(engine, scheduler), facts.get("classes"))
        check_optimizer(index.path, engine.state_settings(), facts["settings"])
        check_sampler(index.path, sampler, facts["sampler"])
        if scheduler is not None and facts["scheduler"] is None:
            raise ValueError(
                f"{index.path} was saved without a scheduler; load it without, or save one with it"
            )

    agree(fits, doing)
    state = optimizer_state(index.tensors)
    agree(lambda: engine.load_state_settings(facts["settings"], state), doing)
    from minidist.checkpoint.transfer import read

    drawn = read(engine, index)

    engine.strategy.loaded()

    def rest() -> None:
        engine.load_settings(facts["engine"])
        if scheduler is not None:
            scheduler.load_state_dict(facts["scheduler"])
        if drawn is not None:
            set_random_state(drawn)

    agree(rest, doing)
    return Loaded(index.path, facts["step"], facts["extra"], facts["ranks"])


def _decoded(index: Index) -> dict[str, Any]:
    try:
        return {name: decode(value) for name, value in index.facts.items()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise DamagedCheckpoint(f"the settings in {index.path} cannot be read: {error}") from None
