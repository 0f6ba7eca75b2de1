"""What goes through torch.distributed.checkpoint: imported by the first save or load, as it takes a second.

`save` and `load` decide what; here torch plans it over the ranks, and `planners.py` and `storage.py` do it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from minidist import comm
from minidist.checkpoint.errors import explained, peers
from minidist.checkpoint.index import Index
from minidist.checkpoint.planners import ChunkLoadPlanner, Save
from minidist.checkpoint.state import CheckpointState, buffer_names, own_name, random_name
from minidist.checkpoint.storage import BoxReader, Writer
from minidist.parallel.contract.strategy import TensorBox
from minidist.parallel.engine.training_step import HybridEngine


def write(
    take: Callable[[], CheckpointState], target: Path, keep: int | None, group: dist.ProcessGroup | None
) -> None:
    """Have torch.distributed.checkpoint plan and write; an error of any rank is raised on all."""
    planner, writer = Save(take, comm.rank()), Writer(target, comm.rank(), keep)
    try:
        alone, doing = comm.size() == 1, f"write {writer.path}"
        with warnings.catch_warnings(), peers(doing):
            if alone:  # it warns that one process writes alone
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)
    except CheckpointException as failed:
        writer.discard()
        rank, (error, _) = min(failed.failures.items())
        raise explained(error, rank, doing) from None
    finally:
        writer.close()


def read(engine: HybridEngine, index: Index) -> Tensor | None:
    """Have torch.distributed.checkpoint fill all chunks; this rank's random states, if there are any."""
    rank = comm.rank()
    drawn: Tensor | None = None

    def chunks() -> list[TensorBox]:
        nonlocal drawn
        wanted, buffers = [*engine.chunks()], buffer_names(engine)
        if comm.size() == index.facts["ranks"]:
            wanted = [
                replace(chunk, name=mine)
                if chunk.name in buffers and (mine := own_name(rank, chunk.name)) in index.tensors
                else chunk
                for chunk in wanted
            ]
        stored = index.tensors.get(random_name(rank))
        if stored is not None:
            drawn = torch.empty(stored.shape, dtype=stored.dtype)
            wanted.append(TensorBox(random_name(rank), stored.shape, (0,), drawn))
        return wanted

    planner = _Planner(index, chunks)
    alone, doing = comm.size() == 1, f"load {index.path}"
    try:
        with warnings.catch_warnings(), peers(doing):
            if alone:  # it warns that one process reads alone
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_load({}, storage_reader=BoxReader(index), planner=planner, no_dist=alone)
    except CheckpointException as failed:
        first, (error, _) = min(failed.failures.items())
        raise explained(error, first, doing) from None
    return drawn


class _Planner(ChunkLoadPlanner):
    """A `ChunkLoadPlanner` that asks for its chunks where an error is told to all ranks."""

    def __init__(self, index: Index, chunks: Callable[[], list[TensorBox]]) -> None:
        super().__init__(index, ())
        self._ask = chunks

    def create_local_plan(self) -> Any:
        """The plan for the chunks that there are now."""
        self.chunks = self._ask()
        self.targets = {(chunk.name, chunk.offsets): chunk.tensor for chunk in self.chunks}
        return super().create_local_plan()
