"""Who writes what, and what is read from where: the planners that torch.distributed.checkpoint asks.

Replicas hold the same boxes; each is written once, by the rank that has the least to write so far among those
that hold it. When all ranks' boxes are known, rank 0 sees to it that they make up every tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from minidist.checkpoint.errors import CheckpointError, DamagedCheckpoint
from minidist.checkpoint.index import Index, check_boxes
from minidist.checkpoint.state import CheckpointState, own_name
from minidist.parallel.contract.strategy import TensorBox
from minidist.parallel.flat.ranges import narrowed

BoxKey = tuple[str, tuple[int, ...]]
"""A box's name and offsets."""


class Save(SavePlanner):
    """Plans a save. take: gives this rank's state, or raises, which all ranks then do."""

    def __init__(self, take: Callable[[], CheckpointState], rank: int) -> None:
        self.take, self.rank = take, rank
        self.tensors: dict[BoxKey, Tensor] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the state comes from `take`."""

    def create_local_plan(self) -> SavePlan:
        """What this rank holds, with its settings, and the checksums of its own buffers."""
        state = self.take()
        items = []
        for chunk in state.chunks:
            if not chunk.tensor.numel() and 0 not in chunk.shape:
                continue  # a share of nothing
            self.tensors[chunk.name, chunk.offsets] = chunk.tensor
            items.append(_write_item(chunk))
        return SavePlan(items, planner_data=(state.facts, state.own))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Each box to one rank; and the whole's description, in which `planner_data` are the settings."""
        holders: dict[BoxKey, list[int]] = {}
        described: dict[BoxKey, WriteItem] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                place = item.index.fqn, tuple(item.index.offset or ())
                first = described.setdefault(place, item)
                if first.tensor_data != item.tensor_data:
                    raise CheckpointError(
                        f"rank {rank} holds {place[0]} at {place[1]} as {_text(item)}, and another rank as "
                        f"{_text(first)}; they have to be equal"
                    )
                holders.setdefault(place, []).append(rank)
        writes: list[list[WriteItem]] = [[] for _ in all_plans]
        load = [0] * len(all_plans)
        # Replicas are equal but for buffers, of which rank 0's count.
        buffers = {what for plan in all_plans for what, _ in plan.planner_data[1].values()}
        tensors: dict[str, TensorStorageMetadata] = {}
        for place, ranks in holders.items():
            item = described[place]
            data = item.tensor_data
            assert data is not None
            if _superfluous(place[0], ranks, all_plans):
                continue
            writer = ranks[0] if place[0] in buffers else min(ranks, key=lambda rank: load[rank])
            load[writer] += math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
            writes[writer].append(item)
            whole = tensors.setdefault(place[0], TensorStorageMetadata(data.properties, data.size, []))
            if (whole.size, whole.properties.dtype) != (data.size, data.properties.dtype):
                raise CheckpointError(f"the boxes of {place[0]} are of tensors of different shapes or dtypes")
            whole.chunks.append(data.chunk)
        for name, whole in tensors.items():
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in whole.chunks]
            try:
                check_boxes(name, tuple(whole.size), boxes)
            except ValueError as error:
                raise CheckpointError(f"the strategy's chunks do not make up the state: {error}") from None
        facts = _merged([plan.planner_data[0] for plan in all_plans])
        plans = [
            replace(plan, items=items, planner_data=None)
            for plan, items in zip(all_plans, writes, strict=True)
        ]
        return plans, Metadata(dict(tensors), planner_data=facts)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As rank 0 planned it."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The tensor of a box."""
        return self.tensors[write_item.index.fqn, tuple(write_item.index.offset or ())]


def _write_item(chunk: TensorBox) -> WriteItem:
    offsets, sizes = torch.Size(chunk.offsets), chunk.tensor.shape
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, sizes),
        TensorProperties(dtype=chunk.tensor.dtype),
        torch.Size(chunk.shape),
    )
    return WriteItem(MetadataIndex(chunk.name, offsets), WriteItemType.SHARD, tensor_data=data)


def _text(item: WriteItem) -> str:
    data = item.tensor_data
    assert data is not None
    return f"{data.properties.dtype} of sizes {tuple(data.chunk.sizes)} of {tuple(data.size)}"


def _superfluous(name: str, ranks: list[int], plans: list[SavePlan]) -> bool:
    """Whether a rank's own copy of a buffer equals rank 0's, as a checksum tells."""
    (rank, *_) = ranks
    shared = plans[rank].planner_data[1].get(name)
    if shared is None:
        return False
    what, checksum = shared
    return bool(plans[0].planner_data[1].get(own_name(0, what), (what, None))[1] == checksum)


def _merged(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0's settings; what of the optimizer's state is no tensor, from the ranks that have it."""
    merged = dict(facts[0])
    state: dict[str, Any] = {}
    for each in facts:
        state |= each["settings"]["state"]
    merged["settings"] = {**merged["settings"], "state": state}
    return merged


class ChunkLoadPlanner(LoadPlanner):
    """Plans a load of `chunks`, each from the tensor that it is named after."""

    def __init__(self, index: Index, chunks: Iterable[TensorBox]) -> None:
        self.index, self.chunks = index, list(chunks)
        self.targets = {(chunk.name, chunk.offsets): chunk.tensor for chunk in self.chunks}
        self.metadata: Mapping[str, Any] = {}

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take what the reader says is there."""
        assert metadata is not None
        self.metadata = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """For each box the parts of the file's boxes that lie in it."""
        items: list[ReadItem] = []
        for chunk in self.chunks:
            if not chunk.tensor.numel():
                continue
            stored = self.metadata.get(chunk.name)
            if stored is None or tuple(stored.size) != chunk.shape:
                there = "nothing of that name" if stored is None else f"shape {tuple(stored.size)}"
                raise CheckpointError(
                    f"{chunk.name} has shape {chunk.shape} here, and {self.index.path} has {there}; load the "
                    "checkpoint of this model and optimizer"
                )
            box = ChunkStorageMetadata(torch.Size(chunk.offsets), chunk.tensor.shape)
            found = create_read_items_for_chunk_list(chunk.name, stored, [box])
            if sum(math.prod(item.lengths) for item in found) != chunk.tensor.numel():
                raise DamagedCheckpoint(f"{self.index.path} has not all of {chunk.name}; load another")
            items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank reads its own."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it was made."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never: all that is read are numbers of tensors."""
        raise CheckpointError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of this rank's tensor that an item fills."""
        target = self.targets[read_item.dest_index.fqn, tuple(read_item.dest_index.offset or ())]
        return narrowed(target, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: `resolve_tensor` gave a view."""
