"""Check that a checkpoint fits the model, optimizer, scheduler and order of rows that it is loaded into.

The checks run before anything of the engine changes. Each raises an error that names the first difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minidist.checkpoint.errors import CheckpointError
from minidist.checkpoint.index import Index, stored_names
from minidist.checkpoint.state import sampler_settings
from minidist.model.sampler import Sampler
from minidist.parallel.engine.training_step import Engine

_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
"""Keys that schedulers add to an optimizer's groups."""


def model_shapes(engine: Engine) -> dict[str, tuple[int, ...]]:
    """Return the whole shapes of the model's tensors of which this rank holds a part, by name."""
    return {
        chunk.name.partition(".")[2]: chunk.shape
        for chunk in engine.chunks()
        if chunk.name.startswith("model.")
    }


def check_model(index: Index, here: dict[str, tuple[int, ...]]) -> None:
    """CheckpointError for the first difference between the saved model and this one."""
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


def check_classes(path: Path, here: dict[str, str | None], saved: dict[str, str | None] | None) -> None:
    """CheckpointError for another class of optimizer or scheduler. Older checkpoints do not name theirs."""
    for what, theirs in (saved or {}).items():
        mine = here[what]
        if None not in (mine, theirs) and mine != theirs:
            raise CheckpointError(
                f"{path} is of another {what}: it was saved with {theirs}, and is loaded with {mine}; give "
                f"the {what} that was saved"
            )


def check_optimizer(path: Path, here: dict[str, Any], saved: dict[str, Any]) -> None:
    """CheckpointError if the optimizer's groups have other settings, as those of another optimizer do."""
    for number, (mine, theirs) in enumerate(zip(here["groups"], saved["groups"], strict=False)):
        different = ({*mine} ^ {*theirs}) - _OF_SCHEDULERS
        if different:
            name = min(different)
            has, lacks = ("it", "the engine's") if name in theirs else ("the engine's", "it")
            raise CheckpointError(
                f"{path} is of another optimizer: {has} has {name!r} in its group {number}, and {lacks} "
                "has none; prepare the optimizer that was saved"
            )


def check_sampler(path: Path, sampler: Sampler | None, saved: dict[str, Any] | None) -> None:
    """ValueError if the sampler deals rows in another order than the saved one, or none was saved."""
    if sampler is None:
        return
    if saved is None:
        raise ValueError(f"{path} was saved without a sampler; load it without, or save one with it")
    for name, mine in sampler_settings(sampler).items():
        if mine != saved[name]:
            raise ValueError(
                f"the sampler has {name}={mine} and that of {path} had {saved[name]}, so rows would come in "
                "another order; give the sampler that was saved"
            )
