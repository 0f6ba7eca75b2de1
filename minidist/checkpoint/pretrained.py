"""`load_pretrained`: fill an engine with the weights of safetensors files, such as `save_pretrained` writes.

A safetensors file is one more set of boxes, so this is the last part of `load`: find where a rank's boxes
overlap with the files, and copy these parts. No rank reads or holds more of a tensor than its own part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from minidist.checkpoint.errors import CheckpointError, agree
from minidist.checkpoint.index import Index
from minidist.checkpoint.reading import MappedFiles, overlaps
from minidist.checkpoint.safetensors_files import read_files
from minidist.checkpoint.saving import check_engine
from minidist.parallel.contract.strategy import TensorBox
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.flat.ranges import narrowed


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
    doing, found = f"load {path}", list[tuple[Index, Differences, list[TensorBox]]]()

    def find() -> None:
        index = read_files(path)
        sources, differences = _sources(engine, index, rename or (lambda name: name))
        if strict and any(differences):
            raise CheckpointError(_different(path, *differences))
        _check_shapes(engine, index, path, sources)
        boxes = [
            chunk._replace(name=sources[name])
            for chunk in engine.chunks()
            for kind, _, name in [chunk.name.partition(".")]
            if kind == "model" and name in sources
        ]
        found.append((index, differences, boxes))

    agree(find, doing)
    index, differences, boxes = found[0]
    agree(lambda: _fill(index, boxes), doing)
    engine.strategy.loaded()
    return differences


def _sources(
    engine: Engine, index: Index, rename: Callable[[str], str]
) -> tuple[dict[str, str], Differences]:
    """For each name of the whole model the name in the files that it is read from; and the differences."""
    first, names = engine.placement.first, [*engine.placement.entries]
    here = {name: rename(name) for name in names}
    # A tied parameter has several names, and files may have any of them; all read the same one.
    source: dict[str, str] = {}
    for name in names:
        if here[name] in index.tensors:
            source.setdefault(first.get(name, name), here[name])
    found = {name: source[first.get(name, name)] for name in names if first.get(name, name) in source}
    return found, Differences(
        [name for name in names if name not in found], sorted(index.tensors.keys() - set(here.values()))
    )


def _check_shapes(engine: Engine, index: Index, path: Path, sources: Mapping[str, str]) -> None:
    """CheckpointError for tensors of other shapes in the files than in the model."""
    shapes = {name: tuple(engine.placement.entries[name].shape) for name in sources}
    wrong = [
        f"{name} has {shapes[name]} and the files {index.tensors[source].shape}"
        for name, source in sources.items()
        if index.tensors[source].shape != shapes[name]
    ]
    if wrong:
        raise CheckpointError(
            f"{path} is of a model with other shapes: {_some(wrong, '; ')}; prepare the model of its "
            "config.json"
        )


def _fill(index: Index, boxes: Iterable[TensorBox]) -> None:
    files = MappedFiles(index.path)
    for target, stored, box, offsets in overlaps(index, boxes):
        with torch.no_grad():
            target.copy_(narrowed(files.box(stored, box), offsets, target.shape))
        files.release()


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
