"""`save`: one call that leaves a whole checkpoint at a path, or what was there before."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minidist import comm
from minidist.checkpoint import folders
from minidist.checkpoint.state import CheckpointState, Scheduler, take
from minidist.model.sampler import Sampler
from minidist.parallel.contract.engine import Engine
from minidist.parallel.engine.training_step import HybridEngine


class Saving:
    """A save that is under way, or done.

    Attributes:
        path: where the checkpoint is when `wait` has returned.
    """

    def __init__(self, path: Path, work: Callable[[], None], aside: bool) -> None:
        self.path = path
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if aside:
            self._thread = threading.Thread(target=self._run, args=(work,), name="minidist-save")
            self._thread.start()
            atexit.register(self._thread.join)  # a rank that ends must not cut it short
        else:
            work()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error

    def wait(self) -> Path:
        """Wait until the checkpoint is whole on the disk; where it is.

        Raises:
            CheckpointError: it could not be written, on this rank or another; once, here or at the next
                save. A load that comes before warns of it instead.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
            atexit.unregister(thread.join)
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.path

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._thread is None or not self._thread.is_alive()


def save(
    engine: Engine,
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
    scheduler: Scheduler | None = None,
    sampler: Sampler | None = None,
    extra: Any = None,
) -> Saving:
    """Save a training, so that it can go on from here on any number of ranks. Every rank calls it.

    >>> md.save(engine, "runs/digits", step=100, keep=3, sampler=sampler, extra={"losses": losses})

    Saved are the parameters (in the precision in which they are updated), buffers, the optimizer's state, the
    random states of each rank (torch, the GPU's, numpy, Python) and what else is given. Not saved: what
    compression kept back of gradients. `minidist.checkpoint` describes the files.

    Written are the bytes of the state once, each box by one of the ranks that hold it, and read to be counted
    (CRC-32, about a second a gigabyte); all ranks need the same file system. Sent are descriptions of the
    boxes, some hundred bytes each, through torch.distributed's own collectives, outside of the ledger.

    Args:
        engine: of `md.prepare`.
        path: the checkpoint's directory, which is replaced where there is one; with `step`, a folder of them,
            of this training alone. Where it is a symbolic link, all of this is what it points to.
        step: steps done so far. With it the checkpoint is path/step-00000100.
        keep: how many checkpoints of the folder to keep, those saved last, whatever their steps: after going
            back to an earlier step, the later ones are the first to go. One that is damaged, as far as its
            index and the lengths of its files tell, counts for none. None to keep all. Takes `step`.
        asynchronous: copy the state to the CPU's memory, which takes its bytes there once more, and return;
            a thread writes. Call the result's `wait` before the program ends.
        scheduler: of the learning rate, with a `state_dict`.
        sampler: whose order of rows the training follows; a load with another order is an error.
        extra: anything that JSON can hold, such as the losses so far; rank 0's is saved.

    Returns:
        A `Saving`, whose `wait` returns the checkpoint's path. Where an earlier save of this engine is under
        way, it is waited for first.

    Raises:
        ValueError: keep without step, a number out of range, or path is the root of all files.
        TypeError: an argument of the wrong type, or something in the settings that JSON cannot hold.
        CheckpointError: on all ranks, where one of them could not write (a full disk, a read-only path); what
            was at the path before is untouched. Also where the save before, asynchronous, had failed.
        CollectiveError: a peer is gone or late.
    """
    hybrid = check_engine(engine)
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise ValueError(f"step is {step!r}; give the number of steps done, from 0")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep is {keep!r}; give at least 1, or None to keep all")
    if keep is not None and step is None:
        raise ValueError(f"keep={keep} needs step=: checkpoints of a folder are named by their steps")
    folder = Path(os.path.realpath(path))  # what is behind a link is replaced, and the link stays one
    target = folder if step is None else Path(os.path.realpath(folder / folders.step_name(step)))
    if not target.name:
        raise ValueError(f"path is {path}, the root of all files; give the name of a directory to make there")
    if hybrid.saving is not None:
        hybrid.saving.wait()

    from minidist.checkpoint.transfer import write

    # First, since it may be a collective, which no rank enters alone: from here on one may fail by itself.
    taking = _attempt(partial(take, hybrid, step or 0, scheduler, sampler, extra, asynchronous))
    group = _own_group() if asynchronous else None

    def work() -> None:
        try:
            write(taking, target, keep, group)
        finally:
            if group is not None:
                dist.destroy_process_group(group)

    hybrid.saving = saving = Saving(target, work, asynchronous)
    return saving


def check_engine(engine: Engine) -> HybridEngine:
    """TypeError for what is no engine of `md.prepare`."""
    if not isinstance(engine, HybridEngine):
        raise TypeError(f"engine is a {type(engine).__name__}; give what md.prepare returned")
    return engine


def _attempt(taking: Callable[[], CheckpointState]) -> Callable[[], CheckpointState]:
    """Take the state now; the error, if any, is for the planner to raise, which tells all ranks."""
    try:
        state = taking()
    except Exception as error:
        failure = error

        def fail() -> CheckpointState:
            raise failure

        return fail
    return lambda: state


def _own_group() -> dist.ProcessGroup | None:
    """A group for a thread: collectives of the training's own group must not meet its."""
    if comm.size() == 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    limit: timedelta = world._get_backend(torch.device("cpu")).options._timeout
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=limit)
    return group
