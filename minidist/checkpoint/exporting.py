"""`export`: write the weights alone into one file for other programs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from minidist import comm
from minidist.checkpoint.errors import agree
from minidist.checkpoint.folders import WRITING, checkpoints, sync_directory
from minidist.checkpoint.index import read_index, stored_names, verify
from minidist.checkpoint.reading import read_whole
from minidist.parallel.engine.training_step import Engine


def export(source: Engine | str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Write a model's parameters and buffers into one file, under the names of the model passed to `prepare`.

    >>> md.export(engine, "model.safetensors")
    >>> md.export("runs/digits/step-00000100", "model.pt")     # torch.load("model.pt", weights_only=True)

    With an engine, every rank calls it, and rank 0 writes what `full_state_dict` would return. With a
    checkpoint, one process reads and checks the files and needs no engine; the weights are in the precision
    in which they are updated, and a BatchNorm's running statistics are rank 0's, not the ranks' average. The
    writing process holds the whole model in memory.

    Args:
        source: an engine, or a checkpoint's directory.
        path: ends in ".safetensors", or in ".pt" or ".pth" for a `state_dict` by `torch.save`.

    Returns:
        The path of the file. An old file is replaced in one step or not at all.

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
    path = Path(path).absolute()
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise ValueError(f"path is {path}; give a name that ends in .safetensors, .pt or .pth")
    if isinstance(source, Engine):
        order, weights = [*source.model.state_dict()], dict[str, Tensor]()
        for name, value in source.whole():
            if comm.rank() == 0:
                weights[name] = value.to("cpu", copy=True)
        weights = {name: weights[name] for name in dict.fromkeys([*order, *weights]) if name in weights}
        agree(lambda: _write(weights, path) if comm.rank() == 0 else None, f"write {path}")
    else:
        _write(state_dict(source), path)
    return path


def state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return a checkpoint's parameters and buffers, whole, on the CPU, without an engine.

    Raises:
        DamagedCheckpoint: a file, which the message names, is missing, cut short or altered.
        CheckpointError: there is no checkpoint, or it has another version.
    """
    path = Path(path).absolute()
    inside = checkpoints(path)
    such = f", such as {inside[-1]}" if inside else ""
    index = read_index(path, f"give the directory of one checkpoint{such}")
    verify(index, sorted(index.files))
    return {name: read_whole(index, f"model.{name}") for name in stored_names(index.tensors, "model")}


def _write(weights: Mapping[str, Tensor], path: Path) -> None:
    aside = path.with_name(path.name + WRITING)
    here = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    try:
        with open(aside, "wb") as file:
            if path.suffix == ".safetensors":
                file.write(_safetensors(here))
            else:
                torch.save(here, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync_directory(path.parent)


def _safetensors(weights: dict[str, Tensor]) -> bytes:
    from safetensors import SafetensorError
    from safetensors.torch import save

    try:
        return save(weights, {"format": "pt"})
    except (SafetensorError, KeyError, ValueError) as error:
        dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in weights.values()}))
        raise TypeError(
            f"a safetensors file cannot hold these weights, of {dtypes} ({error}); export to .pt"
        ) from None
