"""`save`: leave a whole checkpoint at a path, or what was there before. A thread may do the writing.

Replicas hold the same boxes. Each box is written once, by the rank that has the least to write so far among
those that hold it. Every rank tells the others which boxes it holds, and works out the same plan. Then each
rank writes one file and syncs it. When all have written, rank 0 writes the index and gives the directory its
name.
"""

from __future__ import annotations

import atexit
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from minidist import comm
from minidist._arguments import check_whole
from minidist.checkpoint import folders
from minidist.checkpoint.errors import CheckpointError, agree
from minidist.checkpoint.index import Box, Stored, check_boxes, write_index
from minidist.checkpoint.state import CheckpointState, Scheduler, collect_state, own_name
from minidist.comm.errors import CollectiveError
from minidist.comm.work import limit_of
from minidist.model.sampler import Sampler
from minidist.parallel.engine.training_step import Engine, check_engine
from minidist.parallel.flat.gathering import raw_bytes


class Saving:
    """A save that is under way or done.

    Attributes:
        path: where the checkpoint is once `wait` has returned.
    """

    def __init__(self, path: Path, work: Callable[[], None], aside: bool) -> None:
        self.path = path
        self._future: futures.Future[None] | None = None
        if aside:
            thread = futures.ThreadPoolExecutor(1, "minidist-save")
            self._future = thread.submit(work)
            thread.shutdown(wait=False)
            atexit.register(self.join)  # a rank that ends must finish its save
        else:
            work()

    def wait(self) -> Path:
        """Wait until the checkpoint is whole on the disk, and return its path.

        Raises:
            CheckpointError: it could not be written, on this rank or another. Raised once, here or at the
                next save; a load that comes before warns of it instead.
        """
        self.join()
        future, self._future = self._future, None
        if future is not None:
            future.result()
        return self.path

    def join(self) -> None:
        """Wait until nothing is under way; an error is left to `wait`."""
        if self._future is not None:
            futures.wait([self._future])
            atexit.unregister(self.join)

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._future is None or self._future.done()


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
    group: dist.ProcessGroup | None = None
    if asynchronous and comm.size() > 1:  # the thread's collectives must not mix with the training's
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_of(None)))

    def work() -> None:
        try:
            write(states.pop(), target, keep, group)
        finally:
            if group is not None:
                dist.destroy_process_group(group)

    engine.saving = saving = Saving(target, work, asynchronous)
    return saving


ALIGNMENT = 64
"""Bytes. Every box begins at a multiple of it, so that it can be mapped as any dtype."""

BoxKey = tuple[str, tuple[int, ...]]
"""A box's name and offsets."""


class HeldBox(NamedTuple):
    """A box that a rank holds, as the other ranks hear of it."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.dtype} of sizes {self.sizes} of {self.shape}"


class RankContents(NamedTuple):
    """The contents that one rank could write."""

    boxes: list[HeldBox]
    own: dict[str, tuple[str, int]]  # its own buffers, as in `CheckpointState`
    facts: dict[str, Any]


class WrittenFile(NamedTuple):
    """The file that one rank has written."""

    starts: dict[BoxKey, int]  # each box's first byte
    size: int
    crc: int


def write(state: CheckpointState, target: Path, keep: int | None, group: dist.ProcessGroup | None) -> None:
    """Write a checkpoint to `target`. All ranks call it with their state; an error of one is raised on all.

    keep: how many checkpoints of its folder to keep; None for all. group: all ranks, for the collectives.
    """
    rank, doing, aside = comm.rank(), f"write {target}", folders.written_aside(target)
    tensors = {(box.name, box.offsets): box.tensor for box in state.boxes}
    boxes = [
        HeldBox(box.name, box.offsets, tuple(box.tensor.shape), box.shape, box.tensor.dtype)
        for box in state.boxes
        if box.tensor.numel() or 0 in box.shape  # else an empty share of a tensor
    ]
    lock: int | None = None

    def begin() -> RankContents:
        nonlocal lock
        if rank == 0:
            lock = _make_directory(target, aside)
        return RankContents(boxes, state.own, state.facts)

    try:
        contents = agree(begin, doing, group)
        writes = plan_writes(contents)
        own = {key: tensors[key] for key in writes[rank]}
        written = agree(lambda: write_boxes(aside / file_name(rank), own), doing, group)

        def finish() -> None:
            files, stored = _located(aside, contents, writes, written)
            number = folders.next_number(target.parent)
            write_index(aside, files, stored, _merged_facts(contents), number)
            folders.put_in_place(aside, target)
            if keep is not None:
                folders.keep_newest(target.parent, keep)

        agree(lambda: finish() if rank == 0 else None, doing, group)
    except CollectiveError:  # a peer is gone; the others may still be writing
        raise
    except Exception:
        if lock is not None:
            folders.discard(aside)
        raise
    finally:
        if lock is not None:
            folders.end_writing(lock)


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.bin"


def _make_directory(target: Path, aside: Path) -> int:
    """Make the empty directory `aside`, to be renamed to `target`. Returns the descriptor of its lock."""
    if folders.standing(target) != target:
        os.rename(folders.standing(target), target)
    empty = target.is_dir() and not any(target.iterdir())
    if os.path.lexists(target) and not empty and not folders.is_checkpoint(target):
        raise CheckpointError(
            f"{target} exists and is no checkpoint; give another path, or step= to save into a folder"
        )
    folders.make_directory(target.parent)
    if folders.being_written(aside):
        raise CheckpointError(
            f"another save writes {target} now; give each training a path or folder of its own"
        )
    folders.discard(aside)
    return folders.begin_writing(aside)


def plan_writes(contents: Sequence[RankContents]) -> list[dict[BoxKey, HeldBox]]:
    """Return the boxes that each rank writes, the same on all ranks.

    Raises CheckpointError if the boxes do not make up every tensor, or replicas differ in shape or dtype.
    """
    boxes: dict[BoxKey, HeldBox] = {}
    holders: dict[BoxKey, list[int]] = {}
    for rank, each in enumerate(contents):
        for box in each.boxes:
            key = box.name, box.offsets
            first = boxes.setdefault(key, box)
            if box != first:
                raise CheckpointError(
                    f"rank {rank} holds {box.name} at {box.offsets} as {box}, and another rank as {first}; "
                    "they have to be equal"
                )
            holders.setdefault(key, []).append(rank)
    # Replicas are equal except for buffers; of those, rank 0's are written.
    buffers = {name for each in contents for name, _ in each.own.values()}
    writes: list[dict[BoxKey, HeldBox]] = [{} for _ in contents]
    load = [0] * len(contents)
    wholes: dict[str, list[HeldBox]] = {}
    for key, ranks in holders.items():
        holder = contents[ranks[0]].own
        if key[0] in holder:  # a rank's own copy of a buffer; not written if it equals rank 0's
            buffer, checksum = holder[key[0]]
            if contents[0].own.get(own_name(0, buffer), (buffer, None))[1] == checksum:
                continue
        writer = ranks[0] if key[0] in buffers else min(ranks, key=lambda rank: load[rank])
        load[writer] += math.prod(boxes[key].sizes) * boxes[key].dtype.itemsize
        writes[writer][key] = boxes[key]
        wholes.setdefault(key[0], []).append(boxes[key])
    for name, parts in wholes.items():
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            raise CheckpointError(f"the boxes of {name} are of tensors of different shapes or dtypes")
        try:
            check_boxes(name, parts[0].shape, [(part.offsets, part.sizes) for part in parts])
        except ValueError as error:
            raise CheckpointError(f"the strategy's boxes do not make up the state: {error}") from None
    return writes


def write_boxes(path: Path, boxes: Mapping[BoxKey, Tensor]) -> WrittenFile:
    """Write boxes into one file and sync it. If there are none, there is no file."""
    starts: dict[BoxKey, int] = {}
    crc = size = 0
    if boxes:
        with open(path, "wb", buffering=0) as file:
            for key, tensor in boxes.items():
                gap, data = bytes(-size % ALIGNMENT), raw_bytes(tensor)
                starts[key] = size + len(gap)
                for piece in (gap, data):
                    write_all(file.fileno(), piece)
                    size, crc = size + len(piece), zlib.crc32(piece, crc)
            os.fsync(file.fileno())
    return WrittenFile(starts, size, crc)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`; one system call writes at most 2 GiB."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _located(
    aside: Path,
    contents: Sequence[RankContents],
    writes: Sequence[Mapping[BoxKey, HeldBox]],
    written: Sequence[WrittenFile],
) -> tuple[dict[str, tuple[int, int]], dict[str, Stored]]:
    """Return the index's files and tensors, once every planned box is there."""
    files: dict[str, tuple[int, int]] = {}
    wholes: dict[str, tuple[HeldBox, list[Box]]] = {}
    for rank, (planned, file) in enumerate(zip(writes, written, strict=True)):
        name = file_name(rank)
        if file.starts:
            found = os.path.getsize(aside / name)  # FileNotFoundError if ranks share no file system
            if found != file.size:
                raise CheckpointError(f"{aside / name} has {found} bytes, and {file.size} were written")
            files[name] = (file.size, file.crc)
        for key, box in planned.items():
            if key not in file.starts:
                raise CheckpointError(f"no rank wrote {box.name} at {box.offsets}")
            _, parts = wholes.setdefault(box.name, (box, []))
            parts.append(Box(box.offsets, box.sizes, name, file.starts[key]))
    # In the order of the model, not of the ranks that wrote.
    names = dict.fromkeys(box.name for each in contents for box in each.boxes)
    ordered = {name: wholes[name] for name in names if name in wholes}
    return files, {name: Stored(box.dtype, box.shape, tuple(parts)) for name, (box, parts) in ordered.items()}


def _merged_facts(contents: Sequence[RankContents]) -> dict[str, Any]:
    """Return rank 0's facts, joined by the state of optimizer and model that is no tensor, of all ranks."""
    facts = dict(contents[0].facts)
    state: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for each in contents:
        state |= each.facts["settings"]["state"]
        extra = {**each.facts["extra_state"], **extra}
    facts["settings"] = {**facts["settings"], "state": state}
    facts["extra_state"] = extra
    return facts
