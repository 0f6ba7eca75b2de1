"""What torch.distributed.checkpoint writes through and reads through: plain files of numbers, and the index.

Each rank writes one file, and syncs it; rank 0, when all have written, writes the index and gives the
directory its name. Reading maps the files into memory, so that only the pages are read that are asked for.
"""

from __future__ import annotations

import math
import mmap
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from minidist.checkpoint import folders
from minidist.checkpoint.boxes import view
from minidist.checkpoint.errors import CheckpointError
from minidist.checkpoint.index import Box, Index, Stored, write_index
from minidist.checkpoint.state import as_bytes
from minidist.parallel.flat.ranges import narrowed

ALIGNMENT = 64
"""Bytes: a box begins at a multiple of it, so that it may be mapped as any dtype."""


class Writer(StorageWriter):
    """Writes a checkpoint beside its path, and renames it at the end.

    rank: this one. keep: how many checkpoints stay of those beside it; None for all.
    """

    def __init__(self, path: Path, rank: int, keep: int | None = None) -> None:
        self.path, self.aside, self.rank, self.keep = path, folders.written_aside(path), rank, keep
        self._held: int | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to reset: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Rank 0 makes an empty directory."""
        if not is_coordinator:
            return
        if folders.standing(self.path) != self.path:
            os.rename(folders.standing(self.path), self.path)
        empty = self.path.is_dir() and not any(self.path.iterdir())
        if os.path.lexists(self.path) and not empty and not folders.is_checkpoint(self.path):
            raise CheckpointError(
                f"{self.path} exists and is no checkpoint; give another path, or step= to save into a folder"
            )
        folders.make_directory(self.path.parent)
        if folders.being_written(self.aside):
            raise CheckpointError(
                f"another save writes {self.path} now; give each training a path or folder of its own"
            )
        folders.discard(self.aside)
        self._held = folders.begin_writing(self.aside)

    def discard(self) -> None:
        """Remove what was written, where it is this save's."""
        if self._held is not None:
            folders.discard(self.aside)

    def close(self) -> None:
        """Let go of the lock."""
        if self._held is not None:
            folders.end_writing(self._held)
        self._held = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes; done when it returns."""
        name = f"rank-{self.rank:05d}.bin"
        placed: list[tuple[MetadataIndex, int, int]] = []
        crc = at = 0
        if plan.items:
            with open(self.aside / name, "wb", buffering=0) as file:
                for item in plan.items:
                    tensor = planner.resolve_data(item)
                    assert isinstance(tensor, torch.Tensor)
                    data = as_bytes(tensor)
                    gap = bytes(-at % ALIGNMENT)
                    for piece in (gap, data):
                        _write_all(file.fileno(), piece)
                        crc = zlib.crc32(piece, crc)
                    placed.append((item.index, at + len(gap), len(data)))
                    at += len(gap) + len(data)
                os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index, size, (name, start, at, crc)) for index, start, size in placed])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0: see that every box was written, write the index, and give the directory its name."""
        written = {
            (result.index.fqn, tuple(result.index.offset or ())): result.storage_data
            for each in results
            for result in each
        }
        files = {name: (size, crc) for name, _, size, crc in written.values()}
        for name, (size, _) in files.items():
            found = os.path.getsize(self.aside / name)  # FileNotFoundError where ranks share no file system
            if found != size:
                raise CheckpointError(f"{self.aside / name} has {found} bytes, and {size} were written")
        tensors = {}
        for name, whole in metadata.state_dict_metadata.items():
            assert isinstance(whole, TensorStorageMetadata)
            boxes = []
            for chunk in whole.chunks:
                found_at = written.get((name, tuple(chunk.offsets)))
                if found_at is None:
                    raise CheckpointError(f"no rank wrote {name} at {tuple(chunk.offsets)}")
                boxes.append(Box(tuple(chunk.offsets), tuple(chunk.sizes), *found_at[:2]))
            tensors[name] = Stored(whole.properties.dtype, tuple(whole.size), tuple(boxes))
        number = folders.next_number(self.path.parent)
        write_index(self.aside, files, tensors, metadata.planner_data, number)
        folders.put_in_place(self.aside, self.path)
        if self.keep is not None:
            folders.keep_newest(self.path.parent, self.keep)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path will do."""
        return True


def _write_all(descriptor: int, data: Any) -> None:
    """Write all of it: one call writes at most 2 GiB."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class BoxReader(StorageReader):
    """Reads boxes of a checkpoint whose index has been read."""

    def __init__(self, index: Index) -> None:
        self.index = index

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to reset."""

    def read_metadata(self, *args: Any) -> Metadata:
        """What the index says, in torch's terms."""
        tensors: dict[str, Any] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=stored.dtype),
                torch.Size(stored.shape),
                [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in stored.boxes],
            )
            for name, stored in self.index.tensors.items()
        }
        return Metadata(tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy each part into its place, and convert it to the place's dtype; done when it returns."""
        boxes: dict[str, dict[tuple[int, ...], Box]] = {}
        mapped: dict[str, mmap.mmap] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            stored = self.index.tensors[name]
            if name not in boxes:
                boxes[name] = {box.offsets: box for box in stored.boxes if math.prod(box.sizes)}
            box = boxes[name][tuple(item.storage_index.offset or ())]
            source = narrowed(view(self.index.path, stored, box, mapped), item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item)
            target.copy_(source)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path will do."""
        return True
