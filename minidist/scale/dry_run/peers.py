"""The other ranks of a layout, as a dry run sees them: numbers of tokens and shapes of activations.

In a dry run all ranks are taken to be alike, except for these two, which follow from the layout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minidist.parallel.context import zigzag_order
from minidist.parallel.context.arguments import TOLD
from minidist.parallel.contract.layout import Layout
from minidist.parallel.pipeline.schedules import by_name
from minidist.parallel.pipeline.stage_messages import MOST_DIMS, headers
from minidist.scale.dry_run.fake_world import Peers

Form = tuple[Sequence[int], torch.dtype]
"""A tensor's shape and dtype."""


class LayoutPeers(Peers):
    """The peers of a rank on one stage of a layout.

    received: from one of the rank's chunks and a micro-batch's rows to what the stage before sends: the shape
    and the dtype of each tensor. It is known once the model is cut.
    """

    def __init__(self, layout: Layout, stage: int) -> None:
        self.layout, self.stage = layout, stage
        self.received: Callable[[int, int], Sequence[Form]] = lambda chunk, rows: ()
        self._told: set[tuple[int, int]] = set()  # chunks and rows whose shape this rank knows
        self._forms: deque[list[int]] = deque()

    def begin(self, rows: int) -> None:
        """Prepare the shapes that this rank receives in the coming step, in the schedule's order."""
        if self.layout.pp == 1:
            return
        parts = min(self.layout.micro_batches, rows)
        sizes = [len(part) for part in torch.empty(rows, device="meta").tensor_split(parts)]
        schedule = by_name(self.layout.schedule, self.layout.pp, parts, self.layout.chunks)
        for each in schedule[self.stage]:
            key = each.chunk, sizes[each.micro_batch]
            if each.kind == "recv_forward" and key not in self._told:
                self._told.add(key)
                self._forms.extend(headers(self.received(*key)))

    def message(self, into: Tensor, source: int) -> Tensor | None:
        """The shape of a stage's output, sent as numbers; None for other messages, which hold no data."""
        if into.dtype != torch.int64 or into.shape != (2 + MOST_DIMS,) or not self._forms:
            return None
        return torch.tensor(self._forms.popleft())

    def gathered(self, own: Tensor, ranks: tuple[int, ...]) -> list[Tensor]:
        """How many tokens each rank of ring attention has; see `parallel/context/arguments.py`."""
        if self.layout.cp == 1 or own.dtype != torch.int64 or own.numel() != TOLD:
            return super().gathered(own, ranks)
        length = int(own.view(-1)[TOLD - 2])
        found = []
        for index in range(len(ranks)):
            theirs = own.clone()
            theirs.view(-1)[0] = zigzag_order.size(length, len(ranks), index)
            found.append(theirs)
        return found
