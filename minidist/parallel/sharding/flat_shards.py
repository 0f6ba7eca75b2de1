"""This rank's shards of all units, one long tensor for each dtype, and the pieces of it for the optimizer.

An optimizer takes as long for a small tensor as for a middling one, so it gets a few long ones. A parameter
that no rank used in a step has no gradient, and the optimizer has to skip it, as it does in one process. The
long tensor is then cut at that parameter's ends, for good, with its state. It is also cut where another of
the optimizer's groups begins.

Source: Rajbhandari et al. 2020, "ZeRO", section 5.3.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.work import Group
from minidist.parallel.flat.buckets import GradientComm
from minidist.parallel.flat.flat_parameter import FlatParameter
from minidist.parallel.training.clipping import Why, guard


class FlatShards:
    """The shards of `flat_parameters`, which have one dtype and are all trained or all frozen.

    Attributes:
        shard: the long tensor, from which units are gathered.
        updated: what the optimizer updates: `shard`, or its copy in the master dtype.
        grad: (elements,), sums over the ranks; None where the parameters are frozen.
        pieces, bounds, groups: the parts of `updated` that the optimizer takes, in order; the elements of
            each, and the number of its group, None for what the optimizer leaves out.
        param_indices, names, spans, starts: the parameters of which this rank has elements, where these lie,
            and which element of the parameter is the first.
    """

    def __init__(
        self,
        flat_parameters: Sequence[FlatParameter],
        group: Group,
        master: torch.dtype | None,
        empty: Callable[[int, torch.dtype], Tensor] | None,
        group_of: Mapping[str, int],
        longest: int | None = None,
    ) -> None:
        self.flat_parameters, first = flat_parameters, flat_parameters[0]
        length = sum(flat.share for flat in flat_parameters)
        if empty is not None:
            self.shard = empty(length, first.dtype)
        else:  # ranks that share memory read a shard in place: an all-gather then copies everything once
            self.shard = GradientComm(group).zeros(length, first.dtype, first.device)
        self.trained = first.trained
        make = empty or (lambda n, dtype: torch.zeros(n, dtype=dtype, device=self.shard.device))
        self.updated = self.shard
        if self.trained and master is not None and master != first.dtype:
            self.updated = make(length, master)
        self.grad = make(length, self.updated.dtype) if self.trained else None
        self._longest = longest // self.updated.dtype.itemsize if longest else max(1, length)
        self.param_indices: list[int] = []
        self.names: list[str] = []
        self.spans: list[tuple[int, int]] = []
        self.starts: list[int] = []
        offset = 0
        for flat in flat_parameters:
            flat.offset, flat.shard = offset, self.shard[offset : offset + flat.share]
            low = flat.own.start
            for index, name, (start, stop) in zip(flat.param_indices, flat.names, flat.ranges, strict=True):
                begin, end = max(start - low, 0), min(stop - low, flat.share)
                if begin < end:
                    self.param_indices.append(index)
                    self.names.append(name)
                    self.spans.append((offset + begin, offset + end))
                    self.starts.append(low + begin - start)
            offset += flat.share
        self.bounds: list[tuple[int, int]] = []
        self.groups: list[int | None] = []
        for start, stop, of in self._runs(group_of, length) if self.trained else ():
            for low in range(start, stop, self._longest):
                self.bounds.append((low, min(low + self._longest, stop)))
                self.groups.append(of)
        self._why: Why = lambda _: None
        self.pieces = [self._piece(*bound) for bound in self.bounds]

    def _runs(self, group_of: Mapping[str, int], length: int) -> Iterator[tuple[int, int, int | None]]:
        """The elements of one group, up to where another begins."""
        numbers = [group_of.get(name) for name in self.names]
        starts = [i for i in range(len(numbers)) if not i or numbers[i] != numbers[i - 1]]
        edges = [self.spans[i][0] if i else 0 for i in starts] or [0]
        for i, (start, stop) in enumerate(itertools.pairwise([*edges, length])):
            yield start, stop, numbers[starts[i]] if starts else None

    def _piece(self, start: int, stop: int) -> nn.Parameter:
        piece = nn.Parameter(self.updated[start:stop])
        guard([piece], self._why)
        return piece

    def guarded_by(self, why: Why) -> None:
        """Have `clip_grad_norm` refuse the pieces where `why` gives a reason."""
        self._why = why
        guard(self.pieces, why)

    def by_parameter(self) -> Iterator[tuple[str, int, nn.Parameter, slice]]:
        """The parts of parameters in each piece: name, first element in the parameter, piece, place in it."""
        for piece, (low, high) in zip(self.pieces, self.bounds, strict=True):
            for name, (start, stop), offset in zip(self.names, self.spans, self.starts, strict=True):
                begin, end = max(start, low), min(stop, high)
                if begin < end:
                    yield name, offset + begin - start, piece, slice(begin - low, end - low)

    def fill(self) -> None:
        """Copy the shards to the master dtype."""
        if self.updated is not self.shard:
            self.updated.copy_(self.shard)

    def publish(self) -> None:
        """Round what the optimizer has updated to the shards, from which the next pass gathers."""
        if self.updated is not self.shard:
            self.shard.copy_(self.updated)

    def take_back(self) -> None:
        """Keep what was written to the gathered parameters; masters change only where the values did."""
        for flat in self.flat_parameters:
            written = flat.full[flat.own].to(self.shard.device)
            if self.updated is not self.shard:
                updated = self.updated[flat.offset : flat.offset + flat.share]
                updated.copy_(torch.where(written == flat.shard, updated, written.to(updated.dtype)))
            flat.shard.copy_(written)

    def give_gradients(self, used: Sequence[bool], optimizer: torch.optim.Optimizer) -> None:
        """Give each piece its gradient; pieces of parameters that no rank used get None."""
        if self.grad is None:
            return
        unused = [span for i, span in zip(self.param_indices, self.spans, strict=True) if not used[i]]
        if unused:
            self._cut_out(unused, optimizer)
        starts = [start for start, _ in unused]
        for piece, (start, stop) in zip(self.pieces, self.bounds, strict=True):
            last = bisect_right(starts, start) - 1  # the unused span that it may lie in
            inside = last >= 0 and stop <= unused[last][1]
            piece.grad = None if inside else self.grad[start:stop]

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
        self.groups[index : index + 1] = [self.groups[index]] * len(new)
        for group in optimizer.param_groups:
            group["params"] = [p for each in group["params"] for p in (new if each is old else [each])]
        state = optimizer.state.pop(old, None)
        for piece, (low, high) in zip(new, bounds, strict=True):
            if state:
                optimizer.state[piece] = {
                    key: _part(value, old, low - start, high - start) for key, value in state.items()
                }

    def within(self, start: int, stop: int) -> Iterator[tuple[nn.Parameter, tuple[int, int]]]:
        """The pieces from one element to another, at which pieces begin and end, with their bounds."""
        pairs = zip(self.pieces, self.bounds, strict=True)
        first = bisect_left(self.bounds, (start, start))
        for piece, bound in itertools.islice(pairs, first, None):
            if bound[0] >= stop:
                break
            yield piece, bound

    def cut_everywhere(self, optimizer: torch.optim.Optimizer) -> None:
        """Make a piece for every parameter, and one for each padding."""
        self._cut_out(self.spans, optimizer)

    def merge(self, optimizer: torch.optim.Optimizer) -> None:
        """Join neighbouring pieces whose state lies side by side and is otherwise the same."""
        index = 1
        while index < len(self.pieces):
            first, second = self.pieces[index - 1], self.pieces[index]
            bound = self.bounds[index - 1][0], self.bounds[index][1]
            apart = self.groups[index - 1] != self.groups[index] or bound[1] - bound[0] > self._longest
            joined = None if apart else _joined(first, second, optimizer)
            if joined is None:
                index += 1
                continue
            piece = self._piece(*bound)
            del self.groups[index]
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
    """The elements of a state tensor that has the parameter's shape; a copy of any other."""
    if not isinstance(value, Tensor):
        return value
    return value[start:stop] if value.shape == whole.shape and value.dim() else value.clone()
