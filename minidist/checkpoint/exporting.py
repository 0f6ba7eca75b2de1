"""`export`: the weights alone, in one file that other programs read.

The safetensors format is eight bytes of a length, a JSON header of that length, and the numbers; it is
written here without a library (format: https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from minidist import comm
from minidist.checkpoint.errors import agree
from minidist.checkpoint.folders import WRITING, sync_directory
from minidist.checkpoint.index import read_index, verify
from minidist.checkpoint.state import as_bytes
from minidist.checkpoint.storage import read_whole, stored_names
from minidist.parallel.engine import Engine

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What the format calls the dtypes that a model has."""


def export(source: Engine | str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Write a model's parameters and buffers into one file, under the names of the model passed to `prepare`.

    >>> md.export(engine, "model.safetensors")
    >>> md.export("runs/digits/step-00000100", "model.pt")     # torch.load("model.pt", weights_only=True)

    Of an engine every rank calls it, and rank 0 writes: what its `full_state_dict` gives. Of a checkpoint one
    process reads and checks the files, without an engine; the weights then are in the precision in which they
    are updated. The whole model is in that process's memory.

    Args:
        source: an engine, or a checkpoint's directory.
        path: ends in ".safetensors", or in ".pt" or ".pth" for a `state_dict` by `torch.save`.

    Returns:
        The path of the file. It is replaced at once or not at all.

    Raises:
        ValueError: another ending.
        TypeError: a dtype that the safetensors format does not have.
        CheckpointError: the file could not be written, on all ranks; or no whole checkpoint is there.
    """
    path = Path(path).absolute()
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise ValueError(f"path is {path}; give a name that ends in .safetensors, .pt or .pth")
    if isinstance(source, Engine):
        weights = source.full_state_dict()
        agree(lambda: _write(weights, path) if comm.rank() == 0 else None, f"write {path}")
    else:
        _write(state_dict(source), path)
    return path


def state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The parameters and buffers of a checkpoint, whole, on the CPU, without an engine.

    Raises:
        DamagedCheckpoint: a file is missing, cut short or altered; names it.
        CheckpointError: no checkpoint is there, or one of another version.
    """
    index = read_index(Path(path).absolute())
    verify(index, sorted(index.files))
    return {name: read_whole(index, f"model.{name}") for name in stored_names(index.tensors, "model")}


def _write(weights: Mapping[str, Tensor], path: Path) -> None:
    aside = path.with_name(path.name + WRITING)
    try:
        with open(aside, "wb") as file:
            if path.suffix == ".safetensors":
                file.write(safetensors_header(weights))
                for tensor in weights.values():
                    file.write(as_bytes(tensor))
            else:
                torch.save({name: tensor.detach().cpu() for name, tensor in weights.items()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync_directory(path.parent)


def safetensors_header(weights: Mapping[str, Tensor]) -> bytes:
    """What comes before the numbers; TypeError for a dtype that the format does not have."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in weights.items():
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise TypeError(
                f"{name} has dtype {tensor.dtype}, which a safetensors file cannot hold; export to .pt"
            )
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the numbers begin at a multiple of 8 bytes
    return len(header).to_bytes(8, "little") + header
