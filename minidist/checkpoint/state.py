"""A rank's contribution to a checkpoint: boxes of tensors, and settings.

The strategy gives the boxes of the training state. A rank adds two of its own. One is its random states. The
others are its buffers, because training changes some of them, such as a BatchNorm's statistics, on each rank
alone. Those that differ from rank 0's are kept under the rank's name, for a load on as many ranks.
"""

from __future__ import annotations

import copy
import json
import zlib
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidist import comm
from minidist.checkpoint.values import encode
from minidist.model.sampler import Sampler
from minidist.parallel.contract.tensor_boxes import TensorBox
from minidist.parallel.contract.training_state import extra_state
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.flat.gathering import raw_bytes
from minidist.parallel.training.random_state import random_states, set_random_states

Scheduler = Any
"""A learning-rate scheduler of torch's, or anything with `state_dict` and `load_state_dict`."""

Shaped = tuple[tuple[int, ...], torch.dtype]
"""A tensor's shape and dtype."""


class CheckpointState(NamedTuple):
    """One rank's part of a checkpoint."""

    boxes: list[TensorBox]
    own: dict[str, tuple[str, int]]  # its own buffers: box name -> (buffer name, CRC-32)
    facts: dict[str, Any]  # settings as JSON can hold them; the optimizer's may differ between ranks


def own_name(rank: int, name: str) -> str:
    """Return the name of a rank's own copy of a tensor."""
    return f"rank {rank}.{name}"


def random_name(rank: int) -> str:
    """Return the name of a rank's random states."""
    return own_name(rank, "random")


def collect_state(
    engine: Engine,
    step: int,
    scheduler: Scheduler | None,
    sampler: Sampler | None,
    extra: Any,
    copied: bool,
) -> CheckpointState:
    """Return this rank's state. copied: copy it to the CPU's memory, so that training may go on."""
    rank = comm.rank()
    boxes, own = [box for box in engine.state_boxes() if not engine.tensor_map.is_copy(box.name)], {}
    buffers = buffer_names(engine)
    for box in [box for box in boxes if box.name in buffers]:
        mine = box._replace(name=own_name(rank, box.name))
        own[mine.name] = (box.name, zlib.crc32(raw_bytes(box.tensor)))
        boxes.append(mine)
    drawn = random_state()
    boxes.append(TensorBox(random_name(rank), tuple(drawn.shape), (0,), drawn))
    if copied:
        aside = partial(Tensor.to, device="cpu", copy=True, memory_format=torch.contiguous_format)
        boxes = [box._replace(tensor=aside(box.tensor.detach())) for box in boxes]
    facts = {
        "extra_state": extra_state(engine.model),
        "step": step,
        "ranks": comm.size(),
        "layout": str(engine.layout),
        "settings": engine.state_settings(),
        "engine": engine.settings(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "sampler": None if sampler is None else sampler_settings(sampler),
        "extra": extra,
        "classes": classes(engine, scheduler),
        "ties": ties(engine),
        "config": config_files(engine.model) if rank == 0 else {},
    }
    return CheckpointState(boxes, own, {name: encode(value, name) for name, value in facts.items()})


def classes(engine: Engine, scheduler: Scheduler | None) -> dict[str, str | None]:
    """Return the class names of the optimizer and the scheduler: a state may fit another class's fields."""
    optimizer = getattr(engine.optimizer, "inner", engine.optimizer)  # of a ZeroOptimizer
    return {
        "optimizer": type(optimizer).__name__,
        "scheduler": None if scheduler is None else type(scheduler).__name__,
    }


def ties(engine: Engine) -> dict[str, str]:
    """Return the names of tied parameters that are not their first ones, each with the first."""
    return {name: first for name, first in engine.tensor_map.first.items() if name != first}


def config_files(model: Any) -> dict[str, dict[str, Any]]:
    """Return the files that say how to make a model of transformers, by name; none for other models.

    As its `save_pretrained` writes them, but without its check, which a save of a training should not fail.
    """
    if not callable(getattr(getattr(model, "config", None), "to_json_string", None)):
        return {}
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    found = {"config.json": json.loads(config.to_json_string())}
    if callable(getattr(getattr(model, "generation_config", None), "to_json_string", None)):
        found["generation_config.json"] = json.loads(model.generation_config.to_json_string())
    return found


def buffer_names(engine: Engine) -> set[str]:
    """Return the names of the boxes that are buffers."""
    return {"model." + name for name, _ in engine.model.named_buffers(remove_duplicate=False)}


def sampler_settings(sampler: Sampler) -> dict[str, Any]:
    """Return the settings that determine, with the step, which rows come next."""
    return {name: getattr(sampler, name) for name in ("rows", "global_batch", "seed", "drop_last")}


def random_state() -> Tensor:  # (bytes,) uint8
    """The random states of torch, a GPU, numpy and Python as JSON: some ten thousand bytes."""

    def plain(x: Any) -> Any:  # a tensor or an array
        return bytes(x.tolist()).hex() if isinstance(x, Tensor) else x.tolist()

    return torch.frombuffer(bytearray(json.dumps(random_states(), default=plain).encode()), dtype=torch.uint8)


def set_random_state(state: Tensor) -> None:
    """Set the states that `random_state` returned. ValueError, KeyError or TypeError for anything else."""
    kept = json.loads(bytes(state.tolist()))
    version, words, gauss = kept["python"]
    kept["python"] = version, tuple(words), gauss
    for name in {"torch", "cuda"} & kept.keys():
        kept[name] = torch.frombuffer(bytearray(bytes.fromhex(kept[name])), dtype=torch.uint8)
    set_random_states(kept)
