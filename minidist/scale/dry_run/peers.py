"""The other ranks of a layout, as a dry run sees them: which are alike, and what they send.

In a dry run all ranks are taken to be alike, except for their numbers of tokens and the shapes of
activations, which follow from the layout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minidist.parallel.context import zigzag_order
from minidist.parallel.context.ring_attention import TOLD
from minidist.parallel.contract.layout import Layout
from minidist.parallel.pipeline.schedules import by_name
from minidist.parallel.pipeline.stage_messages import MOST_DIMS, headers
from minidist.parallel.tensor.shares import share_of
from minidist.scale.memory.training_setup import AXES

Form = tuple[Sequence[int], torch.dtype]
"""A tensor's shape and dtype."""


class Peers:
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

    def message(self, into: Tensor) -> Tensor | None:
        """What this rank receives: a stage's output's shape, as numbers; None for messages without data."""
        if into.dtype != torch.int64 or into.shape != (2 + MOST_DIMS,) or not self._forms:
            return None
        return torch.tensor(self._forms.popleft())

    def gathered(self, own: Tensor, ranks: tuple[int, ...]) -> list[Tensor]:
        """What each of these ranks gives to an all-gather to which this rank gives `own`.

        It is the same, except for the ranks' numbers of tokens; see `parallel/context/ring_attention.py`.
        """
        if self.layout.cp == 1 or own.dtype != torch.int64 or own.numel() != TOLD:
            return [own] * len(ranks)
        length = int(own.view(-1)[TOLD - 2])
        found = []
        for index in range(len(ranks)):
            theirs = own.clone()
            theirs.view(-1)[0] = zigzag_order.size(length, len(ranks), index)
            found.append(theirs)
        return found


def kinds(divided: Sequence[int] | None, layout: Layout, batch: tuple[int, int]) -> list[tuple[int, int]]:
    """The first rank of each kind, and how many ranks are of that kind.

    Ranks of different kinds hold or send something different: they are on different stages of the pipeline,
    or have different numbers of rows, tokens, heads or scores. `divided` has the sizes that tensor
    parallelism divides; if it is None, each tp and cp rank is of its own kind.
    """
    rows, tokens = batch
    # A ring's rank sends all keys that pass it, which are all but the next rank's.
    lengths = [zigzag_order.size(tokens, layout.cp, index) for index in range(layout.cp)]
    keys: dict[str, list[tuple[int, ...]]] = {
        axis: [(index,) for index in range(getattr(layout, axis))] for axis in AXES
    }
    keys["dp"] = [(len(range(index, rows, layout.dp)),) for index in range(layout.dp)]
    if divided is not None:
        keys["cp"] = list(zip(lengths, lengths[1:] + lengths[:1], strict=True))
        keys["tp"] = [
            tuple(len(share_of(n, index, layout.tp)) for n in divided) for index in range(layout.tp)
        ]
    found = [(0, 1)]  # ranks, and how many are of their kind
    for axis in AXES:
        classes: dict[tuple[int, ...], list[int]] = {}
        for index, key in enumerate(keys[axis]):
            classes.setdefault(key, []).append(index)
        size, alike = getattr(layout, axis), [*classes.values()]
        found = [(rank * size + each[0], count * len(each)) for rank, count in found for each in alike]
    return sorted(found)
