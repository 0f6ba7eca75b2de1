"""`load_pretrained`: fill an engine with the weights of safetensors files, such as `save_pretrained` writes.

Each rank looks up its own boxes of the model in the files, and copies these slices. No rank reads or holds
more of a tensor than its own part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minidist.checkpoint.errors import CheckpointError, DamagedCheckpoint, agree
from minidist.checkpoint.exporting import FILES_INDEX, ONE_FILE
from minidist.parallel.contract.tensor_boxes import TensorBox
from minidist.parallel.engine.training_step import Engine, check_engine
from minidist.parallel.sharding import state_by_name


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


class Differences(NamedTuple):
    """The names by which a model and the files differ, as torch's `load_state_dict` returns them."""

    missing: list[str]  # names of the model that the files lack: they keep their values
    unexpected: list[str]  # names in the files that the model lacks


def load_pretrained(
    engine: Engine,
    path: str | os.PathLike[str],
    *,
    rename: Callable[[str], str] | None = None,
    strict: bool = True,
) -> Differences:
    """Fill an engine's model with pretrained weights, in any layout. Every rank calls it, before training.

    >>> engine = md.prepare(LlamaForCausalLM(config), optimizer, md.Layout(dp=8, zero=3))
    >>> md.load_pretrained(engine, "Llama-3.2-1B")

    Each rank maps the files and copies the parts that it holds, so memory grows by nothing but the pages of
    one tensor's part. Numbers are converted to the engine's dtype; master weights take them in their own
    precision. Names that share one parameter need one of them in the files. The optimizer's state stays as it
    is. Sends nothing but names, some hundred bytes.

    Args:
        engine: what `md.prepare` returned.
        path: a folder with `model.safetensors`, or with several files and `model.safetensors.index.json`; or
            one safetensors file.
        rename: from a name in the model to its name in the files, such as
            `lambda name: name.removeprefix("transformer.")`; None for the same names.
        strict: raise an error if the model and the files have different names. False loads what both have.

    Returns:
        The names that only the model has and those that only the files have; none if strict.

    Raises:
        CheckpointError: no such files; or other names, or shapes, of which the first few are listed. The
            engine is unchanged. The same on all ranks.
        DamagedCheckpoint: a file is cut short or altered, as far as its header shows.
    """
    check_engine(engine)
    path = Path(os.path.realpath(path))
    doing, found = f"load {path}", list[tuple[Differences, list[tuple[TensorBox, InFile]]]]()

    def find() -> None:
        tensors = find_tensors(path)
        sources, differences = _sources(engine, tensors, rename or (lambda name: name))
        if strict and any(differences):
            raise CheckpointError(_different(path, *differences))
        _check_shapes(engine, path, sources)
        boxes = [
            (box, sources[name])
            for box in engine.state_boxes()
            for kind, _, name in [box.name.partition(".")]
            if kind == "model" and name in sources and box.tensor.numel()
        ]
        found.append((differences, boxes))

    @torch.no_grad()
    def fill() -> None:
        for box, source in found[0][1]:
            box.tensor.copy_(source.read(box.offsets, box.tensor.shape))

    agree(find, doing)
    agree(fill, doing)
    state_by_name.loaded(engine.strategy)
    return found[0][0]


def _sources(
    engine: Engine, tensors: Mapping[str, InFile], rename: Callable[[str], str]
) -> tuple[dict[str, InFile], Differences]:
    """Return the tensor in the files that each name of the whole model is read from; and the differences."""
    first, names = engine.tensor_map.first, [*engine.tensor_map.entries]
    here = {name: rename(name) for name in names}
    # A tied parameter has several names, and files may have any of them; all read the same one.
    source: dict[str, InFile] = {}
    for name in names:
        if here[name] in tensors:
            source.setdefault(first.get(name, name), tensors[here[name]])
    found = {name: source[first.get(name, name)] for name in names if first.get(name, name) in source}
    return found, Differences(
        [name for name in names if name not in found], sorted(tensors.keys() - set(here.values()))
    )


def _check_shapes(engine: Engine, path: Path, sources: Mapping[str, InFile]) -> None:
    """Raise CheckpointError if tensors have other shapes in the files than in the model."""
    shapes = {name: tuple(engine.tensor_map.entries[name].shape) for name in sources}
    wrong = [
        f"{name} has {shapes[name]} and the files {source.shape}"
        for name, source in sources.items()
        if source.shape != shapes[name]
    ]
    if wrong:
        raise CheckpointError(
            f"{path} is of a model with other shapes: {_some(wrong, '; ')}; prepare the model of its "
            "config.json"
        )


def _different(path: Path, missing: list[str], unexpected: list[str]) -> str:
    parts = [
        f"{text} {_some(names)}"
        for text, names in (("lacks", missing), ("has, besides the model's names,", unexpected))
        if names
    ]
    return (
        f"{path} {' and '.join(parts)}; prepare the model that it is of, give rename= for other names, or "
        "strict=False to load what both have"
    )


def _some(names: list[str], between: str = ", ") -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return between.join(names[:5]) + more
