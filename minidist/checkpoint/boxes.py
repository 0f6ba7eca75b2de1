"""Tensors of a checkpoint's files, which are mapped and not read."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path

import torch

from minidist.checkpoint.index import Box, Index, Stored
from minidist.parallel.flat.ranges import narrowed


def read_whole(index: Index, name: str) -> torch.Tensor:
    """One tensor of a checkpoint, put together from its boxes, in memory."""
    stored, mapped = index.tensors[name], dict[str, mmap.mmap]()
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for box in stored.boxes:
        if math.prod(box.sizes):
            narrowed(whole, box.offsets, box.sizes).copy_(view(index.path, stored, box, mapped))
    return whole


def view(path: Path, stored: Stored, box: Box, mapped: dict[str, mmap.mmap]) -> torch.Tensor:
    """A box of a file as a tensor, mapped. `mapped` keeps the files that are open."""
    if box.file not in mapped:
        with open(path / box.file, "rb") as file:
            mapped[box.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(
        mapped[box.file], dtype=stored.dtype, count=math.prod(box.sizes), offset=box.start
    ).view(box.sizes)


def stored_names(tensors: Mapping[str, Stored], kind: str) -> dict[str, Stored]:
    """The tensors of a kind, such as "model", by their names without it."""
    return {name.partition(".")[2]: each for name, each in tensors.items() if name.partition(".")[0] == kind}
