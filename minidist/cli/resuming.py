"""A training that is stopped at any moment and goes on: what `minidist train --save` does beside the steps.

A killed rank takes the run with it; torchrun, or whoever gives the command again, starts it anew, and it goes
on from the newest checkpoint that is whole. What came after that is trained again, to the same bits, since
order, random states and sums are the same. SIGTERM, which a spot machine sends shortly before it goes, is no
crash: ranks agree at the end of the step, save, and leave.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
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
from minidist.checkpoint.folders import end_writing
from minidist.model import Sampler
from minidist.parallel.contract.engine import Engine

LOCK = ".lock"
"""A file in the folder, which the run that saves there holds locked until its rank 0 ends, in any way."""
PATIENCE = 10.0
"""Seconds that a folder's lock is waited for: ranks whose launcher was killed may take one or two to end."""


class Resuming:
    """Saves a training as it goes, and takes it up again.

    folder: of the checkpoints. every: steps from one to the next. keep: how many. description: what the
    losses depend on beside the step; a folder of another description is refused.
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
        """Those of the steps done so far, which the engine has then: none where the folder has no checkpoint.

        Raises:
            ValueError: the folder has checkpoints, and they are another training's, or `resume` is False.
            CheckpointError: none of them is whole.
        """
        found = torch.tensor(len(checkpoints(self.folder)), device=comm.device())
        if not comm.broadcast(found):
            return []
        if not resume:
            raise ValueError(
                f"{self.folder} has checkpoints, and the training is not to go on from them; give another "
                "folder, or resume"
            )
        with warnings.catch_warnings(record=True) as passed:
            warnings.filterwarnings("always", "passed over a checkpoint")
            loaded = load(self.engine, self.folder, latest=True, sampler=self.sampler)
        for warning in passed:  # for who gives a command, where in the code is no help
            print(f"minidist: {warning.message}", file=sys.stderr)
        saved = loaded.extra["training"]
        for name, mine in self.description.items():
            if saved.get(name) != mine:
                raise ValueError(
                    f"{loaded.path} is of a training with {name}={saved.get(name)!r}, and this one has "
                    f"{mine!r}; give what it was started with, or another folder"
                )
        self.saved = loaded.step
        losses: list[float] = loaded.extra["losses"]
        return losses

    def step_done(self, losses: list[float], last: bool, asked: bool) -> bool:
        """Save where it is time to; whether the training is to stop here, the same on all ranks.

        losses: of all steps so far. last: whether these are all. asked: whether this rank was asked to stop.
        Sends 2 (n - 1) / n 8 bytes.
        """
        stop = torch.tensor(int(asked), device=comm.device())
        comm.all_reduce(stop, "max")
        step = len(losses)
        if self.saved != step and (last or stop or step % self.every == 0):
            extra = {"losses": losses, "training": self.description}
            save(self.engine, self.folder, step=step, keep=self.keep, sampler=self.sampler, extra=extra)
            self.saved = step
        return bool(stop)


@contextlib.contextmanager
def reserved(folder: str) -> Iterator[None]:
    """Inside, this run alone saves into a folder, which is made where there is none. Every rank calls it.

    Raises:
        ValueError: nothing can be written there, or another run saves there; the same on all ranks.
    """
    held: list[int] = []
    agree(lambda: held.append(_lock(folder)) if comm.rank() == 0 else None, f"lock {folder}")
    try:
        yield
    finally:
        for descriptor in held:
            end_writing(descriptor)


def _lock(folder: str) -> int:
    """The descriptor of a folder's lock, which is free when it is closed."""
    try:
        os.makedirs(folder, exist_ok=True)
        descriptor = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        why = "it is no folder" if error.errno in (errno.EEXIST, errno.ENOTDIR) else error.strerror
        raise ValueError(f"no checkpoint can be saved in {folder}: {why}; give another folder") from None
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            os.close(descriptor)
            raise ValueError(
                f"another run saves in {folder}; wait for its end, or give another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        return descriptor
