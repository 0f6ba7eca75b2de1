"""`export`: write the weights alone, for other programs: one file, or a folder that transformers reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist._arguments import check_whole
from minidist.checkpoint.errors import agree
from minidist.checkpoint.folders import WRITING, checkpoints, make_directory, sync_directory
from minidist.checkpoint.index import Index, read_index, read_whole, stored_names, verify
from minidist.checkpoint.safetensors_files import SafetensorsFiles, divide
from minidist.checkpoint.state import Shaped, config_files, ties
from minidist.checkpoint.values import decode
from minidist.parallel.contract.training_state import extra_state
from minidist.parallel.engine.training_step import Engine


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
    if folder or path.suffix == ".safetensors":
        if isinstance(source, Engine):
            _export_engine(source, path, folder, max_file_bytes)
        else:
            _export_checkpoint(source, path, folder, max_file_bytes)
    elif isinstance(source, Engine):
        order, weights = [*source.model.state_dict(keep_vars=True)], dict[str, Any]()
        for name, value in source.whole():
            if comm.rank() == 0:
                weights[name] = value.to("cpu", copy=True)
        weights |= extra_state(source.model)
        weights = {name: weights[name] for name in dict.fromkeys([*order, *weights]) if name in weights}
        agree(lambda: _write(weights, path) if comm.rank() == 0 else None, f"write {path}")
    else:
        index = _verified(source)
        _write({**dict(_tensors_of(index)), **_extra_state(index)}, path)
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


def _extra_state(index: Index) -> dict[str, Any]:
    """Return the extra state of the model's modules, which older checkpoints lack."""
    found: dict[str, Any] = decode(index.facts.get("extra_state", {}))
    return found


def _refuse_extra_state(extra: Mapping[str, Any]) -> None:
    """Raise TypeError if a model has state that is not a tensor: a safetensors file cannot hold it."""
    for name, value in extra.items():
        raise TypeError(
            f"a safetensors file holds tensors alone, and {name} of the model is a {type(value).__name__}; "
            "export to .pt"
        )


def _export_checkpoint(path: str | os.PathLike[str], target: Path, folder: bool, most: int) -> None:
    """Write a checkpoint's weights into safetensors files, one tensor in memory at a time."""
    index = _verified(path)
    _refuse_extra_state(_extra_state(index))
    again = decode(index.facts.get("ties", {})) if folder else {}  # transformers ties them itself
    stored = stored_names(index.tensors, "model")
    shaped = {name: (each.shape, each.dtype) for name, each in stored.items() if name not in again}
    with closing(_begin(shaped, target, folder, most)) as files:
        for name in shaped:
            files.put(name, read_whole(index, f"model.{name}"))
        files.finish()
    if folder:
        _write_config(decode(index.facts.get("config", {})), target, shaped)


def _export_engine(engine: Engine, target: Path, folder: bool, most: int) -> None:
    """Do the same for an engine, whose tensors all ranks bring together one by one."""
    _refuse_extra_state(extra_state(engine.model))
    again = ties(engine) if folder else {}
    shaped: dict[str, Shaped] = {
        name: (tuple(entry.shape), entry.dtype)
        for name, entry in engine.placement.entries.items()
        if name not in again
    }
    opened, problems, doing = list[SafetensorsFiles](), list[Exception](), f"write {target}"

    def begin() -> None:
        if comm.rank() == 0:
            opened.append(_begin(shaped, target, folder, most))

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
                _write_config(config_files(engine.model), target, shaped)

    try:
        agree(begin, doing)
        for name, value in engine.whole():
            put(name, value)
        agree(finish, doing)
    finally:
        for files in opened:
            files.close()


def _begin(shaped: Mapping[str, Shaped], target: Path, folder: bool, most: int) -> SafetensorsFiles:
    """Open one file, or as many as a folder needs."""
    if not folder:
        return SafetensorsFiles({target: [*shaped]}, shaped)
    make_directory(target)
    return SafetensorsFiles({target / name: own for name, own in divide(shaped, most).items()}, shaped)


def _write_config(files: Mapping[str, dict[str, Any]], folder: Path, shaped: Mapping[str, Shaped]) -> None:
    """Write the files that say how to make the model, with the dtype of its weights."""
    floating = sorted({d for _, d in shaped.values() if d.is_floating_point}, key=lambda d: d.itemsize)
    for name, content in files.items():
        if name == "config.json":
            content = {**content, "dtype": str(floating[0]).removeprefix("torch.")}
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _write(weights: Mapping[str, Any], path: Path) -> None:
    aside = path.with_name(path.name + WRITING)
    here = {
        name: value.detach().cpu().contiguous() if isinstance(value, Tensor) else value
        for name, value in weights.items()
    }
    try:
        with open(aside, "wb") as file:
            torch.save(here, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync_directory(path.parent)
