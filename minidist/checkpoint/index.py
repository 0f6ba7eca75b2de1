"""A checkpoint's index: what is where, whether it is as it was written, and its boxes of tensors.

The index holds the length and the CRC-32 of each file. The CRC-32 of the index itself stands at its beginning
and covers the rest. A CRC-32 detects every flipped bit, every altered run of up to 32 bits, and all but one
in four billion other changes. It protects against failing disks, not against forgery; but forged numbers are
still only numbers, since nothing here is executed.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidist.checkpoint.errors import CheckpointError, DamagedCheckpoint
from minidist.checkpoint.values import dtype_named
from minidist.parallel.contract.tensor_boxes import common_part
from minidist.parallel.flat.ranges import narrowed

INDEX = "index.json"
VERSION = 1
HEAD = b'{"minidist checkpoint": %d, "crc32": "%08x", '
_WHOLE_HEAD = rb'\{"minidist checkpoint": ([1-9]\d{0,8}), "crc32": "([0-9a-f]{8})", '
FILE = r"rank-\d+\.bin"
"""Names of the files beside the index."""
_NUMBER = rb'"saved":(\d{1,18}),'
_PIECE = 2**20  # bytes of a file to read at a time


class Box(NamedTuple):
    """A part of a tensor in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  # its first byte


class Stored(NamedTuple):
    """A tensor in a checkpoint. Its boxes hold every element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class Index(NamedTuple):
    """A checkpoint's contents."""

    path: Path
    files: Mapping[str, tuple[int, int]]  # each file's length and CRC-32
    tensors: Mapping[str, Stored]
    facts: Mapping[str, Any]  # step, ranks, settings, ...


def write_index(
    directory: Path,
    files: Mapping[str, tuple[int, int]],
    tensors: Mapping[str, Stored],
    facts: Mapping[str, Any],
    number: int = 0,
) -> None:
    """Write the index and sync it to the disk. number: of the save, among those in its folder."""
    listed = {
        name: {
            "dtype": str(stored.dtype).removeprefix("torch."),
            "shape": stored.shape,
            "boxes": [[box.offsets, box.sizes, box.file, box.start] for box in stored.boxes],
        }
        for name, stored in tensors.items()
    }
    text = json.dumps(
        {"saved": number, "files": files, "tensors": listed, "facts": facts}, separators=(",", ":")
    )
    body = text[1:].encode()
    with open(directory / INDEX, "wb") as file:
        file.write(HEAD % (VERSION, _checksum(VERSION, body)) + body)
        file.flush()
        os.fsync(file.fileno())


def read_index(path: Path, remedy: str = "give latest=True for a folder of checkpoints") -> Index:
    """Read and check the index of a checkpoint.

    Raises CheckpointError if there is no checkpoint at this path, or it has another version of the format,
    and DamagedCheckpoint if the index is missing or altered.
    """
    try:
        data = (path / INDEX).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if not path.is_dir():
            raise CheckpointError(f"there is no checkpoint at {path}; give the directory of one") from None
        raise DamagedCheckpoint(
            f"{path} has no {INDEX}: it is no checkpoint, or its index is lost; {remedy}"
        ) from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path / INDEX} cannot be read: {error.strerror}; load another") from error
    altered = DamagedCheckpoint(
        f"{path / INDEX} is damaged: it has been cut short or altered since it was written; load another "
        "checkpoint"
    )
    head = re.match(_WHOLE_HEAD, data)
    if head is None:
        raise altered
    version, body = int(head[1]), data[head.end() :]
    if int(head[2], 16) != _checksum(version, body):
        raise altered
    if version != VERSION:
        raise CheckpointError(
            f"{path} has version {version} of the checkpoint format, and this minidist reads version "
            f"{VERSION}; load it with the minidist that wrote it"
        )
    try:
        return _parsed(path, json.loads(b"{" + body))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError):
        raise altered from None


def stored_names(tensors: Mapping[str, Stored], kind: str) -> dict[str, Stored]:
    """Return the tensors of a kind, such as "model", by their names without it."""
    return {name.partition(".")[2]: each for name, each in tensors.items() if name.partition(".")[0] == kind}


def save_number(path: Path) -> int | None:
    """Return a checkpoint's save number, unchecked; None if there is no index with one."""
    try:
        with open(path / INDEX, "rb") as file:
            beginning = file.read(200)
    except OSError:
        return None
    head = re.match(_WHOLE_HEAD, beginning)
    number = re.match(_NUMBER, beginning[head.end() :]) if head is not None else None
    return int(number[1]) if number is not None else None


def seems_whole(path: Path) -> bool:
    """Whether a checkpoint's index is whole and its files have the right lengths. Does not read the files."""
    try:
        return all((path / name).stat().st_size == size for name, (size, _) in read_index(path).files.items())
    except (OSError, CheckpointError):
        return False


def _checksum(version: int, body: bytes) -> int:
    """Return the CRC-32 of version and body. It covers the version, where a bit may flip as well."""
    return zlib.crc32(body, zlib.crc32(b"%d" % version))


def _parsed(path: Path, content: dict[str, Any]) -> Index:
    files = {name: (int(size), int(crc)) for name, (size, crc) in content["files"].items()}
    if not all(re.fullmatch(FILE, name) for name in files):
        raise ValueError("a file lies outside its checkpoint")
    tensors = {}
    for name, each in content["tensors"].items():
        dtype, shape = dtype_named(each["dtype"]), tuple(each["shape"])
        boxes = tuple(
            Box(tuple(offsets), tuple(sizes), file, start) for offsets, sizes, file, start in each["boxes"]
        )
        check_boxes(name, shape, [(box.offsets, box.sizes) for box in boxes])
        for box in boxes:
            end = box.start + math.prod(box.sizes) * dtype.itemsize
            if not 0 <= box.start <= end <= files[box.file][0]:
                raise ValueError("a box lies outside its file")
        tensors[name] = Stored(dtype, shape, boxes)
    return Index(path, files, tensors, dict(content["facts"]))


def check_boxes(
    name: str, shape: Sequence[int], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Raise ValueError unless these boxes (offsets, sizes) hold every element of a tensor exactly once."""
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"a box of {name} has {len(sizes)} dimensions and the tensor {len(shape)}")
        if any(o < 0 or s < 0 or o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a box of {name} at {offsets} of sizes {sizes} lies outside shape {shape}")
    held = sum(math.prod(sizes) for _, sizes in boxes)
    if held != math.prod(shape):
        raise ValueError(
            f"the boxes of {name} hold {held} elements, and the tensor of shape {tuple(shape)} has "
            f"{math.prod(shape)}"
        )
    # Sorted by the first dimension, a box can only overlap those that begin before it ends.
    full = sorted(box for box in boxes if math.prod(box[1]))
    for i, (offsets, sizes) in enumerate(full):
        for others, other_sizes in full[i + 1 :]:
            if shape and others[0] >= offsets[0] + sizes[0]:
                break
            if common_part(offsets, sizes, others, other_sizes) is not None:
                raise ValueError(f"two boxes of {name} overlap, at {offsets} and at {others}")


def verify(index: Index, files: Iterable[str]) -> None:
    """Read files in full and compare them with the index; takes about a second a gigabyte.

    Raises DamagedCheckpoint, which names the first file that is missing, cut short or altered.
    """
    for name in files:
        size, crc = index.files[name]
        path = index.path / name
        try:
            found, found_crc = _counted(path)
        except FileNotFoundError:
            raise DamagedCheckpoint(
                f"{path} is missing: the checkpoint is not whole; load another, and keep checkpoints on a "
                "file system that all ranks share"
            ) from None
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}; load another") from error
        if found != size:
            raise DamagedCheckpoint(
                f"{path} is damaged: it has {found} bytes and was written with {size}; load another "
                "checkpoint"
            )
        if found_crc != crc:
            raise DamagedCheckpoint(
                f"{path} is damaged: its checksum is {found_crc:08x} and was {crc:08x} when it was written; "
                "load another checkpoint"
            )


def _counted(path: Path) -> tuple[int, int]:
    size = crc = 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return size, crc


class MappedFiles:
    """The files of a checkpoint, mapped when they are first used: only the pages that are used are read."""

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
