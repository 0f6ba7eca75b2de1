"""The safetensors format: find tensors in its files, read parts of them, and write a file tensor by tensor.

The format's library reads: it maps a file and copies nothing but the slice that it is asked for. To write,
the library needs all tensors of a file in memory at once. `SafetensorsFiles` writes them one by one, in any
order, and only has to know their shapes before: a file begins with the length of its header in 8 bytes, then
comes the header, JSON with each tensor's dtype, shape and first and last byte, and then the numbers, without
gaps. A large model is several files, and `model.safetensors.index.json` says which tensor is in which.

Source: the format's description in the repository huggingface/safetensors, and transformers' names of files.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minidist.checkpoint.errors import CheckpointError, DamagedCheckpoint
from minidist.checkpoint.folders import WRITING, sync_directory
from minidist.checkpoint.state import Shaped, as_bytes

ONE_FILE, FILES_INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that can be written, by their names in a header."""
_OF_A_MODEL = r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
"""The names of a model's files in a folder."""


class InFile(NamedTuple):
    """A tensor in a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a part of the tensor, mapped. What was read leaves this process's memory with the part."""
        box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        with safe_open(self.path, "pt") as file:
            part: Tensor = file.get_slice(self.name)[box]
        return part


def find_tensors(path: Path) -> dict[str, InFile]:
    """Return the tensors of a safetensors file, or of a folder of them, by name.

    Raises:
        CheckpointError: there is no such file or folder, or the folder has no weights in this format.
        DamagedCheckpoint: a file is cut short or is not in this format, or the index names what is not there.
    """
    if path.is_file():
        return _in_one(path)
    if not path.is_dir():
        raise CheckpointError(f"there is no file or folder {path}; give one with safetensors weights")
    if (path / ONE_FILE).is_file():
        return _in_one(path / ONE_FILE)
    if not (path / FILES_INDEX).is_file():
        names = ", ".join(sorted(os.listdir(path))[:8]) or "nothing"
        raise CheckpointError(
            f"{path} has neither {ONE_FILE} nor {FILES_INDEX}, but {names}; give a folder that "
            "save_pretrained wrote, or one safetensors file"
        )
    try:
        weight_map = dict(json.loads((path / FILES_INDEX).read_bytes())["weight_map"])
        found: dict[str, InFile] = {}
        for name in sorted(set(weight_map.values())):
            found |= _in_one(path / name)
    except (ValueError, KeyError, TypeError):
        raise DamagedCheckpoint(f"{path / FILES_INDEX} is damaged; get it again") from None
    if lost := sorted(weight_map.keys() - found.keys()):
        raise DamagedCheckpoint(
            f"{path / FILES_INDEX} names {lost[0]}, which no file has; get the files again"
        )
    return found


def _in_one(path: Path) -> dict[str, InFile]:
    try:
        with safe_open(path, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror or error}; get it again") from error
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{path} is not a whole safetensors file ({error}); get it again") from None
    return {name: InFile(path, name, shape) for name, shape in shapes.items()}


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
        foreign = sorted({str(dtype) for _, dtype in tensors.values() if dtype not in DTYPES})
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
            header[name] = {"dtype": DTYPES[dtype], "shape": [*shape], "data_offsets": [first, end]}
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
