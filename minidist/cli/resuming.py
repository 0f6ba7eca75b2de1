"""Checkpoints of `minidist train --save`, so that a run which is stopped at any moment can continue.

If a rank is killed, the run ends. When torchrun or the user starts the command again, it continues from the
newest whole checkpoint and repeats the steps after it, to the same bits, since order, random states and sums
are the same. SIGTERM, which a spot machine sends shortly before it goes, is not a crash: the ranks agree at
the end of a step, save and exit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from minidist import comm
from minidist.checkpoint import checkpoints, load, save
from minidist.checkpoint.errors import agree
from minidist.checkpoint.folders import end_writing, newest_whole, step_of, take_lock
from minidist.checkpoint.index import read_index
from minidist.checkpoint.values import decode
from minidist.model import Sampler
from minidist.parallel.engine.training_step import Engine

LOCK = ".lock"
"""A file in the folder that the run which saves there keeps locked until its rank 0 ends, however it ends."""
OPTIONS = {"learning_rate": "--lr ", "precision": "--layout precision="}
"""Options of the command that have another name than what they set."""
PATIENCE = 10.0
"""Seconds to wait for a folder's lock: ranks whose launcher was killed may take one or two to end."""


class Resuming:
    """Saves a training every so many steps, and continues it.

    keep: how many of the newest checkpoints to keep. description: what the losses depend on besides the step;
    a folder with another one is refused.
    """

    def __init__(
        self,
        engine: Engine,
        sampler: Sampler,
        folder: str,
        every: int,
        keep: int,
        description: Mapping[str, Any],
    ) -> None:
        self.engine, self.sampler, self.folder = engine, sampler, folder
        self.every, self.keep, self.description = every, keep, dict(description)
        self.saved: int | None = None  # the step that was saved last

    def losses(self, resume: bool = True) -> list[float]:
        """Load the newest whole checkpoint and return the losses of its steps; none if there is none.

        Raises:
            ValueError: the checkpoints are another training's, or there are some and `resume` is False.
            CheckpointError: none of them is whole.
        """
        there = agree(lambda: check_same(self.folder, self.description, resume), f"read {self.folder}")
        if not there[0]:
            return []
        with warnings.catch_warnings(record=True) as passed:
            warnings.filterwarnings("always", "passed over a checkpoint")
            loaded = load(self.engine, self.folder, latest=True, sampler=self.sampler)
        for warning in passed:  # without the line of code, which does not help the command's user
            print(f"minidist: {warning.message}", file=sys.stderr)
        self.saved = loaded.step
        losses: list[float] = loaded.extra["losses"]
        return losses

    def step_done(self, losses: list[float], last: bool, asked: bool) -> bool:
        """Save if it is time to; return whether the training should stop, the same on all ranks.

        `losses` are those of all steps so far, `last` says whether these are all steps, `asked` whether this
        rank was asked to stop. Each rank sends 2 (n - 1) / n 8 bytes.
        """
        stop = torch.tensor(int(asked), device=comm.device())
        comm.all_reduce(stop, "max")
        step = len(losses)
        if self.saved != step and (last or stop or step % self.every == 0):
            extra = {"losses": losses, "training": self.description}
            save(self.engine, self.folder, step=step, keep=self.keep, sampler=self.sampler, extra=extra)
            self.saved = step
        return bool(stop)


def check_same(folder: str, description: Mapping[str, Any], resume: bool = True) -> bool:
    """Return whether a folder has checkpoints; ValueError unless this training may continue from them."""
    if not checkpoints(folder):
        return False
    if not resume:
        raise ValueError(
            f"{folder} has checkpoints, and the training must not continue from them; give another "
            "folder, or leave --no-resume out"
        )
    newest = newest_whole(folder)
    if newest is None:  # `load` says what is wrong with each
        return True
    extra = decode(read_index(newest).facts["extra"])
    if not isinstance(extra, dict) or not {"training", "losses"} <= extra.keys():
        raise ValueError(f"{newest} was not saved by minidist train; give another folder to --save")
    saved = dict(extra["training"])
    if saved.get("optimizer") == "sgd" and "momentum" not in saved:
        saved["optimizer"] = "momentum"  # as "sgd" was SGD with momentum before plain SGD had a name
    # The data decides which models there are. A training with cross entropy has no "loss".
    for name in dict.fromkeys(("data", *description, "loss")):
        mine, theirs = description.get(name), saved.get(name)
        if theirs != mine:
            option = OPTIONS.get(name, f"--{name.replace('_', '-')} ")
            remedy = f"give {option}{theirs}" if theirs is not None else f"leave {option.split()[0]} out"
            raise ValueError(
                f"{newest} is of a training with {name}={theirs!r}, and this one has {mine!r}; {remedy}, or "
                "another folder to --save"
            )
    return True


def how_to_continue(folder: str, resume: bool = True) -> str:
    """Say which step of a stopped training is saved, and how to go on."""
    newest = newest_whole(folder)
    if newest is None:
        return f"nothing is saved in {folder} yet; the same command starts again"
    again = "the same command" if resume else "the same command, without --no-resume,"
    return f"step {step_of(newest)} is saved in {folder}; {again} continues from there"


@contextlib.contextmanager
def reserved(folder: str) -> Iterator[None]:
    """Lock a folder, and make it if needed, so that only this run saves there. A collective.

    Raises ValueError on all ranks if the folder cannot be written, or another run saves there.
    """
    held: list[int] = []
    agree(lambda: held.append(lock(folder)) if comm.rank() == 0 else None, f"lock {folder}")
    try:
        yield
    finally:
        for descriptor in held:
            end_writing(descriptor)


def lock(folder: str) -> int:
    """Lock a folder, and make it if needed; return the lock's descriptor, which frees it when closed.

    Raises ValueError if the folder cannot be written, or another run saves there.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        descriptor = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        why = "it is not a folder" if error.errno in (errno.EEXIST, errno.ENOTDIR) else error.strerror
        raise ValueError(f"no checkpoint can be saved in {folder}: {why}; give another folder") from None
    deadline = time.monotonic() + PATIENCE
    while not take_lock(descriptor):
        if time.monotonic() >= deadline:
            os.close(descriptor)
            raise ValueError(f"another run saves in {folder}; wait until it ends, or give another folder")
        time.sleep(0.05)
    return descriptor
