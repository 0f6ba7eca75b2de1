"""`export`: write the weights alone, for other programs: one file, or a folder that transformers reads.

The library of the safetensors format reads (pretrained.py). To write, it needs all tensors of a file in
memory at once. `SafetensorsFiles` writes them one by one, in any order, and only has to know their shapes
before: a file begins with the length of its header in 8 bytes, then comes the header, JSON with each tensor's
dtype, shape and first and last byte, and then the numbers, without gaps. A large model is several files, and
`model.safetensors.index.json` says which tensor is in which.

Source: the format's description in the repository huggingface/safetensors, and transformers' names of files.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from minidist import comm
from minidist._arguments import check_whole
from minidist.checkpoint.errors import agree
from minidist.checkpoint.folders import checkpoints, make_directory, sync_directory, written_aside
from minidist.checkpoint.index import Index, read_index, read_whole, stored_names, verify
from minidist.checkpoint.state import Shaped, config_files, ties
from minidist.checkpoint.values import decode
from minidist.parallel.contract.training_state import extra_state
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.flat.gathering import raw_bytes

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


def export(
    source: Engine | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    max_file_bytes: int = 5 * 10**9,
) -> Path:
    """Write a model's parameters and buffers, under the names of the model passed to `prepare`.

    >>> md.export(engine, "model.safetensors")
    >>> md.export("runs/digits/step-00000100", "model.pt")     # torch.load("model.pt", weights_only=True)
    >>> md.export(engine, "my-llama")                          # LlamaForCausalLM.from_pretrained("my-llama")

    With an engine, every rank calls it, and rank 0 writes what `full_state_dict` would return. With a
    checkpoint, one process reads and checks the files and needs no engine; the weights are in the precision
    in which they are updated, and a BatchNorm's running statistics are rank 0's, not the ranks' average.

    A folder is what transformers' `from_pretrained` reads: safetensors files, with an index if they are
    several, a tied parameter once, and of a model that has a `config`, config.json and
    generation_config.json. Its other files stay. (Older checkpoints do not say what is tied, or the config.)
    Tensors go to safetensors files one by one; for a .pt file
    the writing process holds the whole model in memory.

    Args:
        source: an engine, or a checkpoint's directory.
        path: ends in ".safetensors", or in ".pt" or ".pth" for a `state_dict` by `torch.save`. Or a folder:
            one that is there, or a name without an ending, or with "/" at its end.
        max_file_bytes: the most bytes of weights in one file of a folder; a larger tensor has its own file.

    Returns:
        The path. An old file is replaced in one step or not at all; those of a folder one after the other.

    Raises:
        ValueError: the path ends in something else.
        TypeError: the safetensors format lacks a dtype of the weights.
        CheckpointError: the file could not be written (on all ranks); or there is no whole checkpoint.
    """
    if not isinstance(source, Engine | str | os.PathLike):
        raise TypeError(
            f"source is a {type(source).__name__}; give an engine that md.prepare returned, or a "
            "checkpoint's directory"
        )
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path is a {type(path).__name__}; give a file name")
    check_whole("max_file_bytes", max_file_bytes, 1)
    folder = os.fspath(path).endswith(os.sep) or Path(path).is_dir() or not Path(path).suffix
    path = Path(path).absolute()
    if not folder and path.suffix not in (".safetensors", ".pt", ".pth"):
        raise ValueError(
            f"path is {path}; give a name that ends in .safetensors, .pt or .pth, or a folder's, with a / at "
            "its end"
        )
    if isinstance(source, Engine):
        entries = source.tensor_map.entries.items()
        shaped: dict[str, Shaped] = {name: (tuple(entry.shape), entry.dtype) for name, entry in entries}
        extra, tied, config = extra_state(source.model), ties(source), config_files(source.model)
        writes = comm.rank() == 0
    else:
        index = _verified(source)
        shaped = {name: (s.shape, s.dtype) for name, s in stored_names(index.tensors, "model").items()}
        # Older checkpoints lack these.
        extra, tied, config = (
            decode(index.facts.get(name, {})) for name in ("extra_state", "ties", "config")
        )
        writes = True
    opened, problems = list[SafetensorsFiles | StateDictFile](), list[Exception]()

    def begin() -> None:
        if not writes:
            return
        if path.suffix in (".pt", ".pth") and not folder:
            opened.append(StateDictFile(path, [*shaped], extra))
            return
        for name, value in extra.items():
            raise TypeError(
                f"a safetensors file holds tensors alone, and {name} of the model is a "
                f"{type(value).__name__}; export to .pt"
            )
        own = {name: each for name, each in shaped.items() if not (folder and name in tied)}
        files = {path: [*own]}
        if folder:  # transformers ties parameters itself
            make_directory(path)
            files = {path / name: names for name, names in deal_to_files(own, max_file_bytes).items()}
        opened.append(SafetensorsFiles(files, own))

    def put(name: str, value: Tensor) -> None:
        try:
            for files in () if problems else opened:
                files.put(name, value)
        except Exception as error:  # the others wait in the next collective
            problems.append(error)

    def finish() -> None:
        for problem in problems:
            raise problem
        for files in opened:
            files.finish()
            if folder:
                _write_config(config, path, shaped)

    try:
        if isinstance(source, Engine):
            agree(begin, f"write {path}")
            for name, value in source.whole():
                put(name, value)
            agree(finish, f"write {path}")
        else:
            begin()
            for name, value in _tensors_of(index):
                put(name, value)
            finish()
    finally:
        for files in opened:
            files.close()
    return path


def state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return a checkpoint's parameters and buffers, whole, on the CPU, without an engine.

    Raises:
        DamagedCheckpoint: a file, which the message names, is missing, cut short or altered.
        CheckpointError: there is no checkpoint, or it has another version.
    """
    return dict(_tensors_of(_verified(path)))


def _verified(path: str | os.PathLike[str]) -> Index:
    """Return the index of a checkpoint whose files are whole."""
    path = Path(path).absolute()
    inside = checkpoints(path)
    such = f", such as {inside[-1]}" if inside else ""
    index = read_index(path, f"give the directory of one checkpoint{such}")
    verify(index, sorted(index.files))
    return index


def _tensors_of(index: Index) -> Iterator[tuple[str, Tensor]]:
    for name in stored_names(index.tensors, "model"):
        yield name, read_whole(index, f"model.{name}")


def _write_config(files: Mapping[str, dict[str, Any]], folder: Path, shaped: Mapping[str, Shaped]) -> None:
    """Write the files that say how to make the model, with the dtype of its weights."""
    floating = sorted({d for _, d in shaped.values() if d.is_floating_point}, key=lambda d: d.itemsize)
    for name, content in files.items():
        if name == "config.json":
            content = {**content, "dtype": str(floating[0]).removeprefix("torch.")}
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


class StateDictFile:
    """Collects a `state_dict`, and writes it with `torch.save`; in use like `SafetensorsFiles`."""

    def __init__(self, path: Path, order: Sequence[str], extra: Mapping[str, Any]) -> None:
        self._path, self._aside = path, written_aside(path)
        self._values: dict[str, Any] = {**dict.fromkeys(order), **extra}

    def put(self, name: str, value: Tensor) -> None:
        """Add a tensor."""
        self._values[name] = value.detach().to("cpu", copy=True).contiguous()

    def finish(self) -> None:
        """Write the file, and give it its name."""
        with open(self._aside, "wb") as file:
            torch.save(self._values, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self._aside, self._path)
        sync_directory(self._path.parent)

    def close(self) -> None:
        """Remove a file that has not got its name."""
        self._aside.unlink(missing_ok=True)


def deal_to_files(tensors: Mapping[str, Shaped], most: int) -> dict[str, list[str]]:
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
        self._open[path] = file = open(written_aside(path), "wb")  # noqa: SIM115
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
            file.write(raw_bytes(value.to(dtype)))
            self._missing.discard(name)

    def finish(self) -> None:
        """Sync the files, give them their names, and remove the folder's weights of an earlier model."""
        assert not self._missing, self._missing
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
        for path in self._open:
            os.replace(written_aside(path), path)
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
            written_aside(path).unlink(missing_ok=True)
