"""`save`: leave a whole checkpoint at a path, or what was there before. A thread may do the writing."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from minidist import comm
from minidist._arguments import check_whole
from minidist.checkpoint import folders
from minidist.checkpoint.errors import agree
from minidist.checkpoint.state import CheckpointState, Scheduler, collect_state
from minidist.checkpoint.writing import write
from minidist.comm.work import limit_of
from minidist.model.sampler import Sampler
from minidist.parallel.engine.training_step import Engine


class Saving:
    """A save that is under way or done.

    Attributes:
        path: where the checkpoint is once `wait` has returned.
    """

    def __init__(self, path: Path, work: Callable[[], None], aside: bool) -> None:
        self.path = path
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if aside:
            self._thread = threading.Thread(target=self._run, args=(work,), name="minidist-save")
            self._thread.start()
            atexit.register(self._thread.join)  # a rank that ends must finish its save
        else:
            work()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error

    def wait(self) -> Path:
        """Wait until the checkpoint is whole on the disk, and return its path.

        Raises:
            CheckpointError: it could not be written, on this rank or another. Raised once, here or at the
                next save; a load that comes before warns of it instead.
        """
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.path

    def join(self) -> None:
        """Wait until nothing is under way; an error is left to `wait`."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
            atexit.unregister(thread.join)

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
    """Save a training, so that it can continue on any number of ranks. Every rank calls it.

    >>> md.save(engine, "runs/digits", step=100, keep=3, sampler=sampler, extra={"losses": losses})

    Saves the parameters (in the precision in which they are updated), the buffers, the optimizer's state, the
    random states of each rank (torch, the GPU's, numpy, Python) and the arguments below. It does not save
    what compression has kept back of gradients. `minidist.checkpoint` describes the files.

    Writes the bytes of the state once, each box by one of the ranks that hold it, and computes their CRC-32
    (about a second a gigabyte). All ranks need the same file system. Sends descriptions of the boxes, some
    hundred bytes each, by torch.distributed's own collectives, which no ledger counts.

    Args:
        engine: what `md.prepare` returned.
        path: the checkpoint's directory, which is replaced if it exists. With `step`, a folder of checkpoints
            of this training alone. If it is a symbolic link, this all holds for what it points to.
        step: steps done so far. The checkpoint is then path/step-00000100.
        keep: how many checkpoints of the folder to keep: those that were saved last, whatever their steps.
            After going back to an earlier step, the later ones go first. A checkpoint that is damaged,
            judging by its index and its files' lengths, does not count. None keeps all. Needs `step`.
        asynchronous: copy the state to the CPU's memory, which takes its bytes there once more, and return; a
            thread writes. Call `wait` on the result before the program ends.
        scheduler: of the learning rate, with a `state_dict`.
        sampler: the training's order of rows; a load with another order is an error.
        extra: anything that JSON can hold, such as the losses so far; rank 0's is saved.

    Returns:
        A `Saving`, whose `wait` returns the checkpoint's path. An earlier save of this engine that is under
        way is waited for first.

    Raises:
        ValueError: keep without step, a number out of range, or path is the root of all files.
        TypeError: an argument of the wrong type, or something in the settings that JSON cannot hold.
        CheckpointError: on all ranks, if one of them could not write (a full disk, a read-only path); what
            was at the path before is untouched. Also if the asynchronous save before this one had failed.
        CollectiveError: a peer is gone or late.
    """
    check_engine(engine)
    if step is not None:
        check_whole("step", step, 0)
    if keep is not None:
        check_whole("keep", keep, 1)
    if keep is not None and step is None:
        raise ValueError(f"keep={keep} needs step=, after which the checkpoints of a folder are named")
    folder = Path(os.path.realpath(path))  # a link stays, and what it points to is replaced
    target = folder if step is None else Path(os.path.realpath(folder / folders.step_name(step)))
    if not target.name:
        raise ValueError(f"path is {path}, the root of all files; give the name of a directory to make there")
    if engine.saving is not None:
        engine.saving.wait()

    states: list[CheckpointState] = []
    agree(
        lambda: states.append(collect_state(engine, step or 0, scheduler, sampler, extra, asynchronous)),
        f"write {target}",
    )
    group = _thread_group() if asynchronous else None

    def work() -> None:
        try:
            write(states.pop(), target, keep, group)
        finally:
            if group is not None:
                dist.destroy_process_group(group)

    engine.saving = saving = Saving(target, work, asynchronous)
    return saving


def check_engine(engine: Engine) -> None:
    """Raise TypeError unless `engine` is what `md.prepare` returned."""
    if not isinstance(engine, Engine):
        raise TypeError(f"engine is a {type(engine).__name__}; give what md.prepare returned")


def _thread_group() -> dist.ProcessGroup | None:
    """Make a group for the thread, whose collectives must not mix with the training's."""
    if comm.size() == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_of(None)))
    return group
