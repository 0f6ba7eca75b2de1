"""`Strategy`: how data-parallel ranks sum gradients, who updates which parameters, and where the state lies.

The engine's step (engine/training_step.py) is the same for all strategies and calls these methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidist.comm.work import Group
from minidist.parallel.flat.buckets import GradientComm
from minidist.parallel.flat.ranges import boxes


class TensorBox(NamedTuple):
    """A box of a tensor of the training state, as this rank holds it.

    Checkpoints save such boxes and load them into other ones, so a box says where it lies in the whole
    tensor.
    """

    name: str  # "model.layers.0.weight", "optimizer.layers.0.weight.exp_avg"
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # where this box begins in it
    tensor: Tensor  # its values, a view of the state: writing to it changes the state


def cut_chunks(name: str, shape: tuple[int, ...], start: int, values: Tensor) -> Iterator[TensorBox]:
    """The boxes of a tensor that together hold its elements from `start` on, whose values are `values`."""
    flat, done = values.reshape(-1), 0
    for offsets, sizes in boxes(shape, start, start + len(flat)):
        count = torch.Size(sizes).numel()
        yield TensorBox(name, shape, offsets, flat[done : done + count].view(sizes))
        done += count


def common_part(
    offsets: Sequence[int], sizes: Sequence[int], of_other: Sequence[int], sizes_of_other: Sequence[int]
) -> tuple[list[int], list[int], list[int]] | None:
    """What two boxes of a tensor have in common: where it begins in each of them, and its sizes; or None."""
    first = [*map(max, offsets, of_other)]
    ends = (min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, of_other, sizes_of_other, strict=True))
    common = [end - start for start, end in zip(first, ends, strict=True)]
    if min(common, default=1) <= 0:
        return None
    here, there = ([f - o for f, o in zip(first, each, strict=True)] for each in (offsets, of_other))
    return here, there, common


@dataclass(frozen=True, eq=False)
class ResidentTensors:
    """The tensors that a rank keeps between steps, by purpose."""

    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    optimizer: Sequence[Tensor]
    buffers: Sequence[Tensor]


class Strategy(ABC):
    """How the ranks of a data-parallel group train one model together.

    In a step the engine calls `zero_grad`, then `forward` and a backward pass for each micro-batch. All but
    the last are inside `no_sync`, and `begin_final_backward` comes before the last backward pass. Then follow
    `synchronize`, perhaps `rescale` and `multiply`, and `update`, or `drop` if the step is skipped. A
    pipeline computes without `forward`: it calls `ready` first, and `begin_final_backward` before the last
    backward pass, or after it if all were inside `no_sync`.

    Attributes:
        group: the ranks that train it together; None for all of the world.
        gradient_comm: sums gradients over them.
        model: the whole model, if each rank has it.
        optimizer: for the parameters, or this rank's share of them; learning-rate schedulers take it.
        sharded: whether this rank's update uses a share of some gradients, and not all.
        gathers: whether `forward` is a collective, which a rank without rows also has to call.
    """

    group: Group
    gradient_comm: GradientComm
    model: nn.Module
    optimizer: torch.optim.Optimizer
    sharded: bool = False
    gathers: bool = False

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The whole model's outputs for this rank's rows."""

    def ready(self) -> None:  # noqa: B027 (most strategies have nothing to do)
        """Prepare for forward passes that do not call `forward`."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop the gradients of the previous step."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, more backward passes follow: a strategy that keeps whole gradients sends nothing yet."""

    @abstractmethod
    def begin_final_backward(self, weight: float | Tensor, loss_sum: Tensor, waits: bool = True) -> None:
        """Announce the backward pass that completes the gradients, which then become sums over the ranks.

        Args:
            weight, loss_sum: of this rank's losses, and their sum, each times its weight; summed as well.
            waits: whether the end of that pass may wait for the sums.
        """

    @abstractmethod
    def synchronize(self) -> tuple[float, float]:
        """Wait until the gradients are complete; returns weight and loss, summed over the ranks."""

    @abstractmethod
    def rescale(self, factor: float) -> None:
        """Multiply the gradients, including what compression has kept back."""

    @abstractmethod
    def announce(self, is_padding: bool) -> None:
        """Say whether the rows of the next pass are padding, which uses no parameter."""

    @abstractmethod
    def norm(self) -> float:
        """The norm of all gradients, each element counted once: the same on all ranks of the group.

        Sends 2 (n - 1) / n 8 bytes over the ranks that share gradients, if any do.
        """

    @abstractmethod
    def named_gradients(self, once: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The gradients that this rank's update uses, all or a share, with their parameters' first names.

        once: without those that count on another rank, in a sum in which each element counts once.
        """

    @abstractmethod
    def gradient_boxes(self) -> Iterator[TensorBox]:
        """The gradients that this rank's update uses, as boxes named "gradient.NAME"."""

    @abstractmethod
    def multiply(self, factor: float) -> None:
        """Multiply the gradients that `update` uses, in its precision if that is higher than theirs."""

    @abstractmethod
    def drop(self) -> None:
        """Drop the gradients, including what compression has kept back, because the step is skipped."""

    @abstractmethod
    def update(self, closure: Callable[[], Any] | None = None) -> None:
        """Take the optimizer's step; every rank then computes with the new parameters.

        closure: for an optimizer that requires one: runs all passes and `synchronize`, and returns the loss.
        """

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer, as for `Engine.whole`. Sends nothing if each rank has all of them."""
        for name, value in self.model.state_dict().items():
            if isinstance(value, Tensor):  # `training_state.extra_state` has the rest
                yield name, value.detach()

    @abstractmethod
    def held(self) -> ResidentTensors:
        """The tensors that this rank holds now."""

    @abstractmethod
    def state_boxes(self) -> Iterator[TensorBox]:
        """The training state on this rank, in an order that is the same on all replicas of the rank.

        Parameters, in the precision in which they are updated, and buffers are named "model.NAME". Tensors of
        the optimizer's state are named "optimizer.NAME.KEY". Replicas hold the same boxes.
        """

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The state that is not a tensor: the optimizer's groups by names of parameters, and numbers.

        "order", if known, holds the names of parameters in the order in which their gradients come: a list
        for each time that parameters were assigned to buckets, none before the first backward pass.
        """

    @abstractmethod
    def load_settings(self, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore `settings`, and allocate the optimizer state: `state_boxes` then yields all that is loaded.

        Args:
            settings: as the method `settings` returns them.
            state: for each parameter the keys of its optimizer state, each with its whole shape and dtype.
        """

    def loaded(self) -> None:  # noqa: B027 (most strategies have nothing to do)
        """Recompute what depends on the tensors of `state_boxes`, which have been overwritten.

        A collective: all ranks call it when all have written.
        """
