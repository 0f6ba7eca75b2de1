"""The tensors that a rank's optimizer updates: pieces of its share, each as long as it can be.

Few long tensors cost an optimizer fewer calls than many short ones. A piece ends where another parameter
group begins, where the share ends, and, once a parameter had no gradient while its neighbour had one, between
these two: their states differ from then on. A piece's state is cut with it, and joined again where it agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from minidist.parallel.zero_buckets import Fragment, ShardBucket

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Optimizers that look at each element alone, so that a parameter may be cut anywhere. Not their subclasses,
which may do otherwise."""
SCALARS = {"step", "mu_product", "eta", "mu"}
"""What their state has of each parameter once; all else has its shape."""


@dataclass(eq=False)
class Piece:
    """What an optimizer takes for one tensor."""

    bucket: ShardBucket
    group: int  # of the optimizer
    start: int  # in the bucket's share
    fragments: list[Fragment]  # one after the other
    value: Tensor  # the elements, where they lie
    tensor: Tensor  # what the optimizer updates: they themselves, or copies in another dtype

    def __len__(self) -> int:
        return sum(map(len, self.fragments))

    def gradient(self) -> Tensor:
        """Its part of the reduced gradients, in the dtype in which it is updated."""
        assert self.bucket.reduced is not None
        grad = self.bucket.reduced[self.start : self.start + len(self)]
        return grad.view(self.value.shape).to(self.tensor.dtype)


State = dict[str, Any]


class Pieces:
    """This rank's pieces, in `optimizer`'s groups.

    Args:
        optimizer: its groups' parameters are replaced by pieces; its state goes by them.
        master: the dtype of the copies that it updates; None for the values themselves.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, master: torch.dtype | None) -> None:
        self.optimizer, self.master = optimizer, master
        self.cut_anywhere = type(optimizer) in ELEMENTWISE
        self.all: list[Piece] = []

    def add(self, bucket: ShardBucket, group_of: Sequence[int]) -> None:
        """Pieces for this rank's share of a new bucket; `group_of` has each place's group."""
        for key, run in groupby(bucket.fragments(), lambda item: self._together(item[1], group_of)):
            each = [*run]
            fragments = [fragment for _, fragment in each]
            self.all.append(self._piece(bucket, group_of[fragments[0].place], each[0][0], fragments))
            del key
        self._hand_over()

    def _together(self, fragment: Fragment, group_of: Sequence[int]) -> int:
        return group_of[fragment.place] if self.cut_anywhere else fragment.place

    def _piece(self, bucket: ShardBucket, group: int, start: int, fragments: list[Fragment]) -> Piece:
        value = bucket.share_of(bucket.values)[start : start + sum(map(len, fragments))]
        if not self.cut_anywhere:
            value = value.view(bucket.parameters[bucket.places.index(fragments[0].place)].shape)
        tensor = value if self.master in (None, value.dtype) else value.to(self.master)
        return Piece(bucket, group, start, fragments, value, tensor)

    def _hand_over(self) -> None:
        """Have the optimizer's groups consist of the pieces."""
        for number, group in enumerate(self.optimizer.param_groups):
            group["params"] = [piece.tensor for piece in self.all if piece.group == number]

    def parts(self) -> Iterator[tuple[Piece, Fragment, Tensor, State]]:
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

    def _cut(self, state: Mapping[str, Any], start: int, stop: int) -> State:
        return {k: v[start:stop] if self.is_part(k, v) else v for k, v in state.items()}

    def regroup(self, key: Callable[[Piece, Fragment, State], Hashable]) -> None:
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
            run = [*group]
            first = run[0][0]
            fragments = [fragment for _, fragment, _, _ in run]
            if fragments == first.fragments:
                now.append(first)
                continue
            start = first.start + sum(map(len, first.fragments[: first.fragments.index(fragments[0])]))
            now.append(self._remade(first, start, run))
        kept = {id(piece) for piece in now}
        for piece in self.all:
            if id(piece) not in kept:
                self.optimizer.state.pop(piece.tensor, None)
        self.all = now
        self._hand_over()

    def _remade(
        self, first: Piece, start: int, run: Sequence[tuple[Piece, Fragment, Tensor, State]]
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

    def apart(self) -> None:
        """Every parameter's fragment by itself, so that each has its own scalars."""
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

    def _own_part(self, key: str, value: Any, piece: Piece, fragment: Fragment) -> Any:
        if not isinstance(value, Tensor):
            return value
        if key == "step":  # stays where, and as precise as, it is
            return value.detach().clone()
        if self.cut_anywhere and key not in SCALARS:
            value = value.reshape(-1)[fragment.start : fragment.stop]
        dtype = piece.tensor.dtype if value.is_floating_point() else value.dtype
        return value.detach().to(device=piece.tensor.device, dtype=dtype, copy=True)

    def step(self, used: Sequence[float]) -> None:
        """Update the pieces of parameters that had a gradient on any rank, and no others."""
        if not all(used) and any(0 < _count(piece, used) < len(piece.fragments) for piece in self.all):
            self.regroup(lambda piece, fragment, _: (id(piece), used[fragment.place] > 0))
        for piece in self.all:
            has = used[piece.fragments[0].place] > 0
            piece.tensor.grad = piece.gradient() if has else None
        self.optimizer.step()
        for piece in self.all:
            if piece.tensor.grad is not None and piece.tensor is not piece.value:
                piece.value.copy_(piece.tensor)
            piece.tensor.grad = None

    def reload(self) -> bool:
        """Make the values again from the copies, and join what agrees; whether there are copies anywhere."""
        self.join()
        for piece in self.all:
            if piece.tensor is not piece.value:
                piece.value.copy_(piece.tensor)
        return self.master is not None


def _count(piece: Piece, used: Sequence[float]) -> int:
    return sum(used[fragment.place] > 0 for fragment in piece.fragments)


def _has_elements(key: str, value: Any) -> bool:
    return isinstance(value, Tensor) and key not in SCALARS


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
