"""Read tensors from a checkpoint's files, in any other cut than the one in which they were written.

The files are mapped into memory, so that only the pages that are used are read.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from minidist.checkpoint.errors import CheckpointError, DamagedCheckpoint
from minidist.checkpoint.index import Box, Index, Stored
from minidist.parallel.contract.strategy import TensorBox
from minidist.parallel.flat.ranges import narrowed


class MappedFiles:
    """The files of a checkpoint, mapped when they are first used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, mmap.mmap] = {}

    def box(self, stored: Stored, box: Box) -> Tensor:
        """Return a box, with at least one element, as a view of its file."""
        if box.file not in self.files:
            with open(self.path / box.file, "rb") as file:
                self.files[box.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        count = math.prod(box.sizes)
        flat = torch.frombuffer(self.files[box.file], dtype=stored.dtype, count=count, offset=box.start)
        return flat.view(box.sizes)


def read_whole(index: Index, name: str) -> Tensor:
    """Return one tensor of a checkpoint, whole, in memory."""
    stored, files = index.tensors[name], MappedFiles(index.path)
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for box in stored.boxes:
        if math.prod(box.sizes):
            narrowed(whole, box.offsets, box.sizes).copy_(files.box(stored, box))
    return whole


def overlaps(index: Index, chunks: Iterable[TensorBox]) -> list[tuple[Tensor, Stored, Box, list[int]]]:
    """Find what to read for chunks, without reading or changing anything.

    Each overlap of a chunk with a stored box gives the part of the chunk to fill, the stored tensor and box,
    and the offsets of the overlap in the box. Raises CheckpointError if a chunk's tensor is not there, or has
    another shape, and DamagedCheckpoint if a part of a chunk is not there.
    """
    found = []
    for chunk in chunks:
        if not chunk.tensor.numel():
            continue
        stored = index.tensors.get(chunk.name)
        if stored is None or stored.shape != chunk.shape:
            saved = "nothing of that name" if stored is None else f"shape {stored.shape}"
            raise CheckpointError(
                f"{chunk.name} has shape {chunk.shape} here, and {index.path} has {saved}; load the "
                "checkpoint of this model and optimizer"
            )
        missing = chunk.tensor.numel()
        for box in stored.boxes:
            starts = [max(a, b) for a, b in zip(chunk.offsets, box.offsets, strict=True)]
            ends = [
                min(a + n, b + m)
                for a, n, b, m in zip(chunk.offsets, chunk.tensor.shape, box.offsets, box.sizes, strict=True)
            ]
            sizes = [max(0, end - start) for start, end in zip(starts, ends, strict=True)]
            if math.prod(sizes):
                in_chunk = [start - offset for start, offset in zip(starts, chunk.offsets, strict=True)]
                in_box = [start - offset for start, offset in zip(starts, box.offsets, strict=True)]
                found.append((narrowed(chunk.tensor, in_chunk, sizes), stored, box, in_box))
                missing -= math.prod(sizes)
        if missing:
            raise DamagedCheckpoint(f"{index.path} has not all of {chunk.name}; load another")
    return found
