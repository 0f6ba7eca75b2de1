"""Read a checkpoint in another cut: which parts of which stored boxes a rank's own boxes meet.

loading.py copies them.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from minidist.checkpoint.errors import CheckpointError
from minidist.checkpoint.index import Box, Index, Stored
from minidist.parallel.contract.tensor_boxes import TensorBox, common_part
from minidist.parallel.flat.ranges import narrowed


def overlaps(index: Index, boxes: Iterable[TensorBox]) -> list[tuple[Tensor, Stored, Box, list[int]]]:
    """Find what to read for boxes, without reading or changing anything.

    Each overlap of one of `boxes` with a stored box gives the part of it to fill, the stored tensor and box,
    and the offsets of the overlap in the box. A tensor's boxes hold all of it, as `read_index` has checked.
    Raises CheckpointError if a box's tensor is not there, or has another shape.
    """
    found = []
    for ours in boxes:
        if not ours.tensor.numel():
            continue
        stored = index.tensors.get(ours.name)
        if stored is None or stored.shape != ours.shape:
            saved = "nothing of that name" if stored is None else f"shape {stored.shape}"
            raise CheckpointError(
                f"{ours.name} has shape {ours.shape} here, and {index.path} has {saved}; load the "
                "checkpoint of this model and optimizer"
            )
        for box in stored.boxes:
            common = common_part(ours.offsets, ours.tensor.shape, box.offsets, box.sizes)
            if common is not None:
                in_ours, in_box, sizes = common
                found.append((narrowed(ours.tensor, in_ours, sizes), stored, box, in_box))
    return found
