"""The tensors that a rank's optimizer updates: pieces of its share, few and long.

Few long tensors cost an optimizer fewer calls than many short ones; but what it computes on one has to stay
in a core's cache from one operation to the next, hence `PIECE`. A piece also ends where another parameter
group begins, where the share ends, and, once a parameter had no gradient while its neighbour had one, between
these two: their states differ from then on. A piece's state is cut with it, and joined again where it agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor

from minidist.parallel.sharding.elementwise_optimizers import is_elementwise
from minidist.parallel.sharding.zero_buckets import ParameterRange, ShardBucket

PIECE = 2**20
"""Bytes of a piece at most, where parameters may be cut. On one core torch's AdamW took, in tensors of 1 MB
or of 0.5 MB, 0.47 of the time that 1.7 million elements in one took; of 2 MB 0.92, of 0.13 MB 0.60."""
SCALARS = {"step", "mu_product", "eta", "mu"}
"""What their state has of each parameter once; all else has its shape."""


@dataclass(eq=False)
class Piece:
    """What an optimizer takes for one tensor."""

    bucket: ShardBucket
    group: int  # of the optimizer
    start: int  # in the bucket's share
    fragments: list[ParameterRange]  # one after the other
    value: Tensor  # the elements, where they lie
    tensor: Tensor  # what the optimizer updates: they themselves, or copies in another dtype

    def __len__(self) -> int:
        return sum(map(len, self.fragments))

    def gradient(self) -> Tensor:
        """Its part of the reduced gradients, in the dtype in which it is updated."""
        assert self.bucket.reduced is not None
        grad = self.bucket.reduced[self.start : self.start + len(self)]
        return grad.view(self.value.shape).to(self.tensor.dtype)


OptimizerState = dict[str, Any]


class OptimizerSlices:
    """This rank's pieces, in `optimizer`'s groups.

    Args:
        optimizer: its groups' parameters are replaced by pieces; its state goes by them.
        master: the dtype of the copies that it updates; None for the values themselves.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, master: torch.dtype | None) -> None:
        self.optimizer, self.master = optimizer, master
        self.cut_anywhere = is_elementwise(type(optimizer))
        self.all: list[Piece] = []
        self.factor = 1.0  # that the next step multiplies gradients by, in the dtype of the update

    def add(self, bucket: ShardBucket, group_of: Sequence[int]) -> None:
        """Pieces for this rank's share of a new bucket; `group_of` has each place's group."""
        limit = self._limit(bucket) if self.cut_anywhere else bucket.length
        found: list[tuple[int, ParameterRange]] = []
        for start, whole in bucket.fragments():
            for at in range(0, len(whole), limit):
                part = ParameterRange(
                    whole.place, whole.start + at, min(whole.start + at + limit, whole.stop)
                )
                found.append((start + at, part))
        for _, run in groupby(found, lambda item: self._together(item[1], group_of)):
            for each in _chunks([*run], limit, lambda item: len(item[1])):
                fragments = [fragment for _, fragment in each]
                self.all.append(self._piece(bucket, group_of[fragments[0].place], each[0][0], fragments))
        self._hand_over()

    def _limit(self, bucket: ShardBucket) -> int:
        """Elements of a piece at most."""
        return max(1, PIECE // (self.master or bucket.values.dtype).itemsize)

    def _together(self, fragment: ParameterRange, group_of: Sequence[int]) -> int:
        return group_of[fragment.place] if self.cut_anywhere else fragment.place

    def _piece(self, bucket: ShardBucket, group: int, start: int, fragments: list[ParameterRange]) -> Piece:
        value = bucket.share_of(bucket.values)[start : start + sum(map(len, fragments))]
        if not self.cut_anywhere:
            value = value.view(bucket.parameters[bucket.places.index(fragments[0].place)].shape)
        tensor = value if self.master in (None, value.dtype) else value.to(self.master)
        return Piece(bucket, group, start, fragments, value, tensor)

    def _hand_over(self) -> None:
        """Have the optimizer's groups consist of the pieces."""
        for number, group in enumerate(self.optimizer.param_groups):
            group["params"] = [piece.tensor for piece in self.all if piece.group == number]

    def parts(self) -> Iterator[tuple[Piece, ParameterRange, Tensor, OptimizerState]]:
        """Every fragment with its part of the tensor that is updated, and of the state: views."""
        for piece in self.all:
            at = 0
            for fragment in piece.fragments:
                stop = at + len(fragment)
                state = self._cut(self.optimizer.state.get(piece.tensor, {}), at, stop)
                yield piece, fragment, piece.tensor.view(-1)[at:stop], state
                at = stop

    def is_part(self, key: str, value: Any) -> bool:
        """Whether what the state has under `key` is cut with the parameter."""
        return self.cut_anywhere and _has_elements(key, value)

    def _cut(self, state: Mapping[str, Any], start: int, stop: int) -> OptimizerState:
        return {k: v[start:stop] if self.is_part(k, v) else v for k, v in state.items()}

    def regroup(self, key: Callable[[Piece, ParameterRange, OptimizerState], Hashable]) -> None:
        """Cut and join pieces so that neighbours of equal `key`, and only they, are one.

        Does nothing to whole parameters. Where pieces are joined, the scalars of their states are equal.
        """
        if not self.cut_anywhere:
            return
        parts = [*self.parts()]
        runs = groupby(
            parts, lambda part: (id(part[0].bucket), part[0].group, key(part[0], part[1], part[3]))
        )
        now = []
        for _, group in runs:
            together = [*group]
            for run in _chunks(together, self._limit(together[0][0].bucket), lambda part: len(part[1])):
                first = run[0][0]
                fragments = [fragment for _, fragment, _, _ in run]
                if fragments == first.fragments:
                    now.append(first)
                    continue
                before = first.fragments[: first.fragments.index(fragments[0])]
                now.append(self._remade(first, first.start + sum(map(len, before)), run))
        kept = {id(piece) for piece in now}
        for piece in self.all:
            if id(piece) not in kept:
                self.optimizer.state.pop(piece.tensor, None)
        self.all = now
        self._hand_over()

    def _remade(
        self, first: Piece, start: int, run: Sequence[tuple[Piece, ParameterRange, Tensor, OptimizerState]]
    ) -> Piece:
        """The piece that the parts in `run` become, its state with it."""
        fragments = [fragment for _, fragment, _, _ in run]
        value = first.bucket.share_of(first.bucket.values)[start : start + sum(map(len, fragments))]
        inside = all(piece is first for piece, *_ in run)
        at = start - first.start
        if first.tensor is first.value:
            tensor = value
        elif inside:
            tensor = first.tensor[at : at + len(value)]
        else:
            tensor = torch.cat([part for _, _, part, _ in run])
        state = self.optimizer.state.get(first.tensor, {})
        if inside:
            new = {
                k: v if _has_elements(k, v) else _copied(v)
                for k, v in self._cut(state, at, at + len(value)).items()
            }
        else:
            states = [part for *_, part in run]
            new = {
                k: torch.cat([each[k] for each in states]) if _has_elements(k, v) else v
                for k, v in states[0].items()
            }
        piece = Piece(first.bucket, first.group, start, fragments, value, tensor)
        if new:
            self.optimizer.state[tensor] = new
        return piece

    def take_values(self, values: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """For places of parameters that were written to: what they were before, and what they become.

        Copies in another dtype change only where the values did.
        """
        for piece, fragment, tensor, _ in self.parts():
            if piece.tensor is not piece.value and fragment.place in values:
                before, now = (x.reshape(-1)[fragment.start : fragment.stop] for x in values[fragment.place])
                tensor.copy_(torch.where(before == now, tensor, now.to(tensor.dtype)))

    def apart(self) -> None:
        """Every fragment by itself, so that each parameter has its own scalars."""
        self.regroup(lambda piece, fragment, state: fragment.place)

    def join(self) -> None:
        """Neighbours whose scalars agree become one piece."""
        self.regroup(
            lambda piece, fragment, state: tuple(
                (k, None if _has_elements(k, v) else float(v)) for k, v in sorted(state.items())
            )
        )

    def take(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Take this rank's part of the states of whole parameters, by their places."""
        self.apart()
        for piece in self.all:
            (fragment,) = piece.fragments
            if fragment.place in states:
                self.optimizer.state[piece.tensor] = {
                    key: self._own_part(key, value, piece, fragment)
                    for key, value in states[fragment.place].items()
                }
        self.join()

    def _own_part(self, key: str, value: Any, piece: Piece, fragment: ParameterRange) -> Any:
        if not isinstance(value, Tensor):
            return value
        if key == "step":  # stays where, and as precise as, it is
            return value.detach().clone()
        if self.cut_anywhere and key not in SCALARS:
            value = value.reshape(-1)[fragment.start : fragment.stop]
        dtype = piece.tensor.dtype if value.is_floating_point() else value.dtype
        return value.detach().to(device=piece.tensor.device, dtype=dtype, copy=True)

    def step(self, used: Sequence[float], **options: Any) -> None:
        """Update the pieces of parameters that had a gradient on any rank, and no others.

        options: for the optimizer's own step.
        """
        if not all(used) and any(0 < _count(piece, used) < len(piece.fragments) for piece in self.all):
            self.regroup(lambda piece, fragment, _: (id(piece), used[fragment.place] > 0))
        for piece in self.all:
            has = used[piece.fragments[0].place] > 0
            grad = piece.gradient() if has else None
            piece.tensor.grad = grad if grad is None or self.factor == 1 else grad.mul_(self.factor)
        self.factor = 1.0
        self.optimizer.step(**options)
        for piece in self.all:
            if piece.tensor.grad is not None and piece.tensor is not piece.value:
                piece.value.copy_(piece.tensor)
            piece.tensor.grad = None

    def reload(self) -> bool:
        """Make the values again from the copies, and join what agrees; whether there are copies anywhere."""
        for state in self.optimizer.state.values():
            state.update({key: _copied(value) for key, value in state.items() if key in SCALARS})
        self.join()
        for piece in self.all:
            if piece.tensor is not piece.value:
                piece.value.copy_(piece.tensor)
        return self.master is not None


Item = TypeVar("Item")


def _chunks(items: Sequence[Item], limit: int, length: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Runs of the items that are no longer than `limit` together, but for one that alone is longer."""
    chunk: list[Item] = []
    filled = 0
    for item in items:
        if chunk and filled + length(item) > limit:
            yield chunk
            chunk, filled = [], 0
        chunk.append(item)
        filled += length(item)
    yield chunk


def _count(piece: Piece, used: Sequence[float]) -> int:
    return sum(used[fragment.place] > 0 for fragment in piece.fragments)


def _has_elements(key: str, value: Any) -> bool:
    return isinstance(value, Tensor) and key not in SCALARS


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
