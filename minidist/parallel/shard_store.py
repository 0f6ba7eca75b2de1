"""This rank's shards of all units, one long tensor for each dtype, and what the optimizer makes of them.

An optimizer takes as long for a small tensor as for a middling one, so it gets a few long ones. A parameter
that no rank used in a step has no gradient, and the optimizer has to pass it over, as it does in one process:
the long tensor is then cut at that parameter's ends, once and for all, with its state.

Source: Rajbhandari et al. 2020, "ZeRO", section 5.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import Group
from minidist.parallel.shard_flat import Flat


class Store:
    """The shards of `flats`, which have one dtype and are all trained or all frozen.

    Attributes:
        shard: the long tensor, from which units are gathered.
        updated: what the optimizer updates: `shard`, or its copy in the master dtype.
        grad: (elements,), sums over the ranks; None where the parameters are frozen.
        pieces: parts of `updated` that the optimizer takes, in order.
        numbers, names, spans, starts: the parameters of which this rank has elements, where these lie, and
            which element of the parameter is the first.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        group: Group,
        master: torch.dtype | None,
        empty: Callable[[int, torch.dtype], Tensor] | None,
    ) -> None:
        self.flats, first = flats, flats[0]
        length = sum(flat.share for flat in flats)
        if empty is not None:
            self.shard = empty(length, first.dtype)
        elif first.device.type == "cpu":
            # Other ranks read a shard where it lies: an all-gather then copies everything once.
            self.shard = comm.empty_shared((length,), first.dtype, group)
        else:
            self.shard = torch.zeros(length, dtype=first.dtype, device=first.device)
        self.trained = first.trained
        mixed = self.trained and master is not None and master != first.dtype
        self.updated = self.shard
        if mixed:
            assert master is not None
            make = empty or (lambda n, dtype: torch.zeros(n, dtype=dtype, device=self.shard.device))
            self.updated = make(length, master)
        self.grad = torch.zeros_like(self.updated) if self.trained else None
        self.numbers: list[int] = []
        self.names: list[str] = []
        self.spans: list[tuple[int, int]] = []
        self.starts: list[int] = []
        offset = 0
        for flat in flats:
            flat.offset, flat.shard = offset, self.shard[offset : offset + flat.share]
            low = flat.own.start
            for number, name, (start, stop) in zip(flat.numbers, flat.names, flat.ranges, strict=True):
                begin, end = max(start - low, 0), min(stop - low, flat.share)
                if begin < end:
                    self.numbers.append(number)
                    self.names.append(name)
                    self.spans.append((offset + begin, offset + end))
                    self.starts.append(low + begin - start)
            offset += flat.share
        self.bounds: list[tuple[int, int]] = [(0, length)] if self.trained else []
        self.pieces = [self._piece(*bound) for bound in self.bounds]

    def _piece(self, start: int, stop: int) -> nn.Parameter:
        return nn.Parameter(self.updated[start:stop])

    def fill(self) -> None:
        """The copies in the master dtype, from the shards."""
        if self.updated is not self.shard:
            self.updated.copy_(self.shard)

    def publish(self) -> None:
        """The shards, from the copies that the optimizer has updated."""
        if self.updated is not self.shard:
            self.shard.copy_(self.updated)

    def take_back(self) -> None:
        """What was written to the gathered parameters; master copies change only where they did."""
        for flat in self.flats:
            written = flat.full[flat.own].to(self.shard.device)
            if self.updated is not self.shard:
                updated = self.updated[flat.offset : flat.offset + flat.share]
                updated.copy_(torch.where(written == flat.shard, updated, written.to(updated.dtype)))
            flat.shard.copy_(written)

    def give_gradients(self, used: Sequence[bool], optimizer: torch.optim.Optimizer) -> None:
        """Let each piece have its gradient; those of parameters that no rank used have none."""
        if self.grad is None:
            return
        if not all(used[number] for number in self.numbers):
            self._cut_out(
                [s for n, s in zip(self.numbers, self.spans, strict=True) if not used[n]], optimizer
            )
        unused = {span[0] for n, span in zip(self.numbers, self.spans, strict=True) if not used[n]}
        for piece, (start, stop) in zip(self.pieces, self.bounds, strict=True):
            piece.grad = None if start in unused else self.grad[start:stop]

    def _cut_out(self, spans: Sequence[tuple[int, int]], optimizer: torch.optim.Optimizer) -> None:
        cuts = sorted({edge for span in spans for edge in span})
        for index in reversed(range(len(self.bounds))):
            start, stop = self.bounds[index]
            edges = [start, *(cut for cut in cuts if start < cut < stop), stop]
            if len(edges) > 2:
                self.cut(index, edges, optimizer)

    def cut(self, index: int, edges: Sequence[int], optimizer: torch.optim.Optimizer) -> None:
        """Replace a piece by smaller ones, each with its part of the optimizer's state."""
        old, start = self.pieces[index], edges[0]
        bounds = [*itertools.pairwise(edges)]
        new = [self._piece(*bound) for bound in bounds]
        self.pieces[index : index + 1], self.bounds[index : index + 1] = new, bounds
        for group in optimizer.param_groups:
            places = [place for place, each in enumerate(group["params"]) if each is old]
            for place in places:
                group["params"][place : place + 1] = new
        state = optimizer.state.pop(old, None)
        for piece, (low, high) in zip(new, bounds, strict=True):
            if state:
                optimizer.state[piece] = {
                    key: _part(value, old, low - start, high - start) for key, value in state.items()
                }

    def cut_everywhere(self, optimizer: torch.optim.Optimizer) -> None:
        """A piece for every parameter, and one for each padding."""
        self._cut_out(self.spans, optimizer)

    def merge(self, optimizer: torch.optim.Optimizer) -> None:
        """Join neighbouring pieces whose state lies side by side and is otherwise the same."""
        index = 1
        while index < len(self.pieces):
            first, second = self.pieces[index - 1], self.pieces[index]
            joined = _joined(first, second, optimizer)
            if joined is None:
                index += 1
                continue
            bound = self.bounds[index - 1][0], self.bounds[index][1]
            piece = self._piece(*bound)
            self.pieces[index - 1 : index + 1], self.bounds[index - 1 : index + 1] = [piece], [bound]
            for group in optimizer.param_groups:
                group["params"] = [piece if p is first else p for p in group["params"] if p is not second]
            for old in (first, second):
                optimizer.state.pop(old, None)
            if joined:
                optimizer.state[piece] = joined


def _joined(first: Tensor, second: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """The state of two neighbours as one; None where they have to stay apart."""
    one, two = optimizer.state.get(first, {}), optimizer.state.get(second, {})
    if one.keys() != two.keys():
        return None
    together = {}
    for key, value in one.items():
        other = two[key]
        if not isinstance(value, Tensor) or not isinstance(other, Tensor):
            if type(value) is not type(other) or value != other:
                return None
        elif value.dim() == 0 or other.dim() == 0:
            if not torch.equal(value, other):
                return None
        else:
            adjacent = value.data_ptr() + value.numel() * value.element_size() == other.data_ptr()
            if not adjacent or value.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
                return None
            value = value.as_strided((len(value) + len(other),), (1,))
        together[key] = value
    return together


def _part(value: Any, whole: Tensor, start: int, stop: int) -> Any:
    """Elements of a state tensor that has the parameter's shape; a copy of any other."""
    if not isinstance(value, Tensor):
        return value
    return value[start:stop] if value.shape == whole.shape and value.dim() else value.clone()
