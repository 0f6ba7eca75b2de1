"""What a checkpoint is made of: this rank's chunks and settings, as they are or copied.

Beside the strategy's chunks there are a rank's own: its random states, and its buffers. Buffers that training
changes, such as a BatchNorm's statistics, are each rank's own; those that differ from rank 0's are kept under
the rank's name, for a load on as many ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.checkpoint.random_state import random_state
from minidist.checkpoint.values import encode
from minidist.model.sampler import Sampler
from minidist.parallel.contract.strategy import TensorBox
from minidist.parallel.engine.training_step import HybridEngine

Scheduler = Any
"""A learning-rate scheduler of torch's: something with `state_dict` and `load_state_dict`."""


Shaped = tuple[tuple[int, ...], torch.dtype]
"""A tensor's shape and dtype."""


@dataclass(frozen=True)
class CheckpointState:
    """One rank's part of a checkpoint."""

    chunks: list[TensorBox]
    own: dict[str, tuple[str, int]]  # its own buffers: for each chunk's name the buffer's, and its CRC-32
    facts: dict[str, Any]  # the same on all ranks but for the optimizer's, as JSON can hold them


def own_name(rank: int, name: str) -> str:
    """The name of a rank's own copy of a tensor."""
    return f"rank {rank}.{name}"


def random_name(rank: int) -> str:
    """The name of a rank's random states."""
    return own_name(rank, "random")


def take(
    engine: HybridEngine,
    step: int,
    scheduler: Scheduler | None,
    sampler: Sampler | None,
    extra: Any,
    copied: bool,
) -> CheckpointState:
    """This rank's state. copied: to the CPU's memory, so that training may go on."""
    rank = comm.rank()
    chunks, own = [*engine.chunks()], {}
    buffers = buffer_names(engine)
    for chunk in [chunk for chunk in chunks if chunk.name in buffers]:
        mine = replace(chunk, name=own_name(rank, chunk.name))
        own[mine.name] = (chunk.name, zlib.crc32(as_bytes(chunk.tensor)))
        chunks.append(mine)
    drawn = random_state()
    chunks.append(TensorBox(random_name(rank), tuple(drawn.shape), (0,), drawn))
    if copied:
        chunks = [replace(chunk, tensor=_copy(chunk.tensor)) for chunk in chunks]
    facts = {
        "step": step,
        "ranks": comm.size(),
        "layout": str(engine.layout),
        "settings": engine.state_settings(),
        "engine": engine.settings(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "sampler": None if sampler is None else sampler_settings(sampler),
        "extra": extra,
        "classes": classes(engine, scheduler),
    }
    return CheckpointState(chunks, own, {name: encode(value, name) for name, value in facts.items()})


def classes(engine: HybridEngine, scheduler: Scheduler | None) -> dict[str, str | None]:
    """Of which classes the optimizer and the scheduler are: many a state fits another's fields."""
    optimizer = getattr(engine.optimizer, "inner", engine.optimizer)  # of a ZeroOptimizer or MasterWeights
    return {
        "optimizer": type(optimizer).__name__,
        "scheduler": None if scheduler is None else type(scheduler).__name__,
    }


def buffer_names(engine: HybridEngine) -> set[str]:
    """The chunks of `engine` that are buffers."""
    return {"model." + name for name, _ in engine.model.named_buffers(remove_duplicate=False)}


def sampler_settings(sampler: Sampler) -> dict[str, Any]:
    """What the order of rows depends on; with the step it is the sampler's position."""
    return {name: getattr(sampler, name) for name in ("rows", "global_batch", "seed", "drop_last")}


def as_bytes(tensor: Tensor) -> memoryview:
    """A tensor's elements in order, as they lie in memory; those of a GPU, or with gaps, are copied."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def optimizer_state(tensors: Mapping[str, Any]) -> dict[str, dict[str, Shaped]]:
    """For each parameter the keys of its optimizer state, with shapes and dtypes, from an index's tensors."""
    state: dict[str, dict[str, Shaped]] = {}
    for name, stored in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            parameter, _, key = rest.rpartition(".")
            state.setdefault(parameter, {})[key] = (stored.shape, stored.dtype)
    return state


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
