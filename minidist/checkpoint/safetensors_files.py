"""The safetensors format: read its files as an index of boxes, and write them tensor by tensor.

A file begins with the length of its header in 8 bytes. The header is JSON that gives each tensor's dtype,
shape and first and last byte; the numbers follow, without gaps. So a reader maps a file and takes the parts
that it needs, and a writer that knows all shapes can write tensors in any order. A large model is several
files, and `model.safetensors.index.json` says which tensor is in which.

Source: the format's description in the repository huggingface/safetensors, and transformers' names of files.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from minidist.checkpoint.errors import CheckpointError, DamagedCheckpoint
from minidist.checkpoint.folders import WRITING, sync_directory
from minidist.checkpoint.index import Box, Index, Stored
from minidist.checkpoint.state import Shaped, as_bytes

ONE_FILE, FILES_INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_OF_A_MODEL = r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
"""The names of a model's files in a folder."""
_LONGEST_HEADER = 100_000_000  # bytes, as in the library of the format


def read_files(path: Path) -> Index:
    """Return what a safetensors file, or a folder of them, holds: an index in which each tensor is one box.

    Raises:
        CheckpointError: there is no such file or folder, or the folder has no weights in this format.
        DamagedCheckpoint: a file is cut short or is not in this format, or the index names what is not there.
    """
    if path.is_file():
        return Index(path.parent, {}, _tensors(path), {})
    if not path.is_dir():
        raise CheckpointError(f"there is no file or folder {path}; give one with safetensors weights")
    if (path / ONE_FILE).is_file():
        return Index(path, {}, _tensors(path / ONE_FILE), {})
    if not (path / FILES_INDEX).is_file():
        names = ", ".join(sorted(os.listdir(path))[:8]) or "nothing"
        raise CheckpointError(
            f"{path} has neither {ONE_FILE} nor {FILES_INDEX}, but {names}; give a folder that "
            "save_pretrained wrote, or one safetensors file"
        )
    try:
        weight_map = dict(json.loads((path / FILES_INDEX).read_bytes())["weight_map"])
        found: dict[str, Stored] = {}
        for name in sorted(set(weight_map.values())):
            found |= _tensors(path / name)
    except (ValueError, KeyError, TypeError):
        raise DamagedCheckpoint(f"{path / FILES_INDEX} is damaged; get it again") from None
    if lost := sorted(weight_map.keys() - found.keys()):
        raise DamagedCheckpoint(
            f"{path / FILES_INDEX} names {lost[0]}, which no file has; get the files again"
        )
    return Index(path, {}, found, {})


def _tensors(path: Path) -> dict[str, Stored]:
    """Read a file's header: each tensor's dtype, shape and place."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _LONGEST_HEADER)))
        header.pop("__metadata__", None)
        return {name: _stored(path, entry, 8 + length, size) for name, entry in header.items()}
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}; get it again") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} is not a whole safetensors file ({error!r}); get it again") from None


def _stored(path: Path, entry: Mapping[str, Any], start: int, size: int) -> Stored:
    dtype, shape = DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
    first, last = entry["data_offsets"]
    if last - first != math.prod(shape) * dtype.itemsize or not 0 <= first <= last <= size - start:
        raise ValueError(f"bytes {first} to {last} of {size - start}")
    return Stored(dtype, shape, (Box((0,) * len(shape), shape, path.name, start + first),))


def divide(tensors: Mapping[str, Shaped], most: int) -> dict[str, list[str]]:
    """Divide tensors, in their order, among files of at most `most` bytes: file name -> tensor names.

    A tensor that is larger gets a file of its own.
    """
    files: list[list[str]] = [[]]
    size = 0
    for name, (shape, dtype) in tensors.items():
        own = math.prod(shape) * dtype.itemsize
        if files[-1] and size + own > most:
            files.append([])
            size = 0
        files[-1].append(name)
        size += own
    if len(files) == 1:
        return {ONE_FILE: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}


class SafetensorsFiles:
    """Writes tensors, in any order, into files that get their names at the end.

    files: the names of the tensors of each file; several of a folder get an index. tensors: what each is.
    Raises TypeError if the format lacks a dtype.
    """

    def __init__(self, files: Mapping[Path, Sequence[str]], tensors: Mapping[str, Shaped]) -> None:
        self._files, self._tensors, self._missing = files, tensors, set[str]()
        self._open: dict[Path, BinaryIO] = {}
        self._where: dict[str, tuple[BinaryIO, int]] = {}
        foreign = sorted({str(dtype) for _, dtype in tensors.values() if dtype not in _NAMES})
        if foreign:
            raise TypeError(
                f"a safetensors file cannot hold these weights, of {', '.join(foreign)}; export to .pt"
            )
        try:
            for path, names in files.items():
                self._begin(path, names)
        except BaseException:
            self.close()
            raise

    def _begin(self, path: Path, names: Iterable[str]) -> None:
        """Open a file, and write its header."""
        # The widest dtype first: then every tensor begins at a multiple of its dtype's size.
        order = sorted(names, key=lambda name: -self._tensors[name][1].itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        starts, end = dict[str, int](), 0
        for name in order:
            shape, dtype = self._tensors[name]
            starts[name], first = end, end
            end += math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": [*shape], "data_offsets": [first, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        # Stays open until all tensors have come.
        self._open[path] = file = open(path.with_name(path.name + WRITING), "wb")  # noqa: SIM115
        file.write(len(text).to_bytes(8, "little") + text)
        self._where |= {name: (file, 8 + len(text) + start) for name, start in starts.items()}
        self._missing |= starts.keys()

    def put(self, name: str, value: Tensor) -> None:
        """Write a tensor, if one of the files is to have it."""
        if name in self._where:
            shape, dtype = self._tensors[name]
            file, start = self._where[name]
            assert tuple(value.shape) == tuple(shape), name
            file.seek(start)
            file.write(as_bytes(value.to(dtype)))
            self._missing.discard(name)

    def finish(self) -> None:
        """Sync the files, give them their names, and remove the folder's weights of an earlier model."""
        assert not self._missing, self._missing
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
        for path in self._open:
            os.replace(path.with_name(path.name + WRITING), path)
        for folder in {path.parent for path in self._open}:
            self._put_index(folder)
            sync_directory(folder)

    def _put_index(self, folder: Path) -> None:
        """Write the index of several files; remove what `from_pretrained` would read instead."""
        of_a_model = [each for each in folder.iterdir() if re.fullmatch(_OF_A_MODEL, each.name)]
        if not {*self._open} & {*of_a_model}:
            return  # one file with a name of its own
        several = len(self._open) > 1
        if several:
            weight_map = {name: path.name for path, names in self._files.items() for name in names}
            size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._tensors.values())
            text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2)
            (folder / FILES_INDEX).write_text(text + "\n")
        for path in of_a_model:
            if path not in self._open and not (several and path.name == FILES_INDEX):
                path.unlink()

    def close(self) -> None:
        """Close the files, and remove those that have not got their names."""
        for path, file in self._open.items():
            file.close()
            path.with_name(path.name + WRITING).unlink(missing_ok=True)
