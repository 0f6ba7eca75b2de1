"""Checkpoints of `minidist train --save`, so that a run which is stopped at any moment can continue.

If a rank is killed, the run ends. When torchrun or the user starts the command again, it continues from the
newest whole checkpoint and repeats the steps after it, to the same bits, since order, random states and sums
are the same. SIGTERM, which a spot machine sends shortly before it goes, is not a crash: the ranks agree at
the end of a step, save and exit.
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
from minidist.parallel.engine.training_step import Engine

LOCK = ".lock"
"""A file in the folder that the run which saves there keeps locked until its rank 0 ends, however it ends."""
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
        found = torch.tensor(len(checkpoints(self.folder)), device=comm.device())
        if not comm.broadcast(found):
            return []
        if not resume:
            raise ValueError(
                f"{self.folder} has checkpoints, and the training must not continue from them; give another "
                "folder, or resume"
            )
        with warnings.catch_warnings(record=True) as passed:
            warnings.filterwarnings("always", "passed over a checkpoint")
            loaded = load(self.engine, self.folder, latest=True, sampler=self.sampler)
        for warning in passed:  # without the line of code, which does not help the command's user
            print(f"minidist: {warning.message}", file=sys.stderr)
        saved = dict(loaded.extra["training"])
        if saved.get("optimizer") == "sgd" and "momentum" not in saved:
            saved["optimizer"] = "momentum"  # as "sgd" was SGD with momentum before plain SGD had a name
        for name, mine in self.description.items():
            if saved.get(name) != mine:
                raise ValueError(
                    f"{loaded.path} is of a training with {name}={saved.get(name)!r}, and this one has "
                    f"{mine!r}; give the same {name}, or another folder"
                )
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


@contextlib.contextmanager
def reserved(folder: str) -> Iterator[None]:
    """Lock a folder, and make it if needed, so that only this run saves there. A collective.

    Raises ValueError on all ranks if the folder cannot be written, or another run saves there.
    """
    held: list[int] = []
    agree(lambda: held.append(_lock(folder)) if comm.rank() == 0 else None, f"lock {folder}")
    try:
        yield
    finally:
        for descriptor in held:
            end_writing(descriptor)


def _lock(folder: str) -> int:
    """Lock a folder; return the lock's descriptor, which frees it when closed."""
    try:
        os.makedirs(folder, exist_ok=True)
        descriptor = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        why = "it is not a folder" if error.errno in (errno.EEXIST, errno.ENOTDIR) else error.strerror
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
                f"another run saves in {folder}; wait until it ends, or give another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        return descriptor
