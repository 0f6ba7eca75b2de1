"""What the other ranks of a layout would tell a rank: the sizes of their tokens, the form of what they send.

In a dry run all ranks are alike but for these two, which follow from the layout.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from minidist.parallel.context import zigzag_order
from minidist.parallel.context.arguments import TOLD
from minidist.parallel.contract.layout import Layout
from minidist.parallel.pipeline.schedules import by_name
from minidist.parallel.pipeline.stage_messages import DTYPES, MOST_DIMS
from minidist.scale.dry_run.fake_world import Peers


class LayoutPeers(Peers):
    """The peers of one rank of a layout.

    Args:
        layout: of all ranks.
        stage: of the pipeline, that the rank has.
        stream: tokens and features of what goes from stage to stage: (T, D).
        dtype: of it.
    """

    def __init__(self, layout: Layout, stage: int, stream: tuple[int, int], dtype: torch.dtype) -> None:
        self.layout, self.stage, self.stream, self.dtype = layout, stage, stream, dtype
        self._told: set[tuple[int, int]] = set()  # chunks and rows whose form this rank has been told
        self._forms: deque[list[int]] = deque()

    def begin(self, rows: int) -> None:
        """A step begins: in its order come messages whose form is not known yet."""
        if self.layout.pp == 1:
            return
        parts = min(self.layout.micro_batches, rows)
        sizes = [len(part) for part in torch.empty(rows, device="meta").tensor_split(parts)]
        schedule = by_name(self.layout.schedule, self.layout.pp, parts, self.layout.chunks)
        for each in schedule[self.stage]:
            key = each.chunk, sizes[each.micro_batch]
            if each.kind == "recv_forward" and key not in self._told:
                self._told.add(key)
                shape = [sizes[each.micro_batch], *self.stream]
                self._forms.append([DTYPES.index(self.dtype), len(shape), *shape])

    def message(self, into: Tensor, source: int) -> Tensor | None:
        """The form of a stage's output comes as numbers, all else holds no data."""
        if into.dtype != torch.int64 or not self._forms:
            return None
        numbers = self._forms.popleft()
        return torch.tensor([*numbers, *[0] * (2 + MOST_DIMS - len(numbers))])

    def gathered(self, own: Tensor, ranks: tuple[int, ...]) -> list[Tensor]:
        """Ring attention's ranks tell how many tokens they have; see ring_arguments.py."""
        if self.layout.cp == 1 or own.dtype != torch.int64 or own.numel() != TOLD:
            return super().gathered(own, ranks)
        length = int(own.view(-1)[TOLD - 2])
        found = []
        for place in range(len(ranks)):
            theirs = own.clone()
            theirs.view(-1)[0] = zigzag_order.size(length, len(ranks), place)
            found.append(theirs)
        return found
