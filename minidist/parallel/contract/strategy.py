"""What a strategy gives an engine: how the data-parallel ranks agree, and where the training state lies.

An engine's step is the same for all of them, see `engine/training_step.py`; a strategy says how gradients
become sums over the ranks, who updates which parameters, and where every piece of the state is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.work import Group
from minidist.parallel.flat.ranges import boxes, narrowed


@dataclass(frozen=True, eq=False)
class TensorBox:
    """A box of a tensor of the training state, as this rank holds it.

    A checkpoint writes chunks and reads others, cut in another way: what counts is the place in the whole.
    """

    name: str  # "model.layers.0.weight", "optimizer.layers.0.weight.exp_avg"
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # where this box begins in it
    tensor: Tensor  # its values, a view of the state: who writes to it changes the state


def cut_chunks(name: str, shape: tuple[int, ...], start: int, values: Tensor) -> Iterator[TensorBox]:
    """Chunks of a tensor's elements from `start` on, which `values` holds."""
    flat, done = values.reshape(-1), 0
    for offsets, sizes in boxes(shape, start, start + len(flat)):
        count = torch.Size(sizes).numel()
        yield TensorBox(name, shape, offsets, flat[done : done + count].view(sizes))
        done += count


@dataclass(frozen=True, eq=False)
class ResidentTensors:
    """The tensors that a rank keeps between steps, by what they are for. Storages count once."""

    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    optimizer: Sequence[Tensor]
    buffers: Sequence[Tensor]


class Strategy(ABC):
    """How the ranks of a data-parallel group train one model together.

    In a step the engine calls `zero_grad`, then `forward` and a backward pass for each micro-batch, all but
    the last inside `no_sync`, with `begin_final_backward` before the last backward; then `synchronize`,
    perhaps `rescale`; then perhaps `multiply`, and `update`, or `drop` where the step is skipped. Where it is
    not `forward` that computes, but a pipeline with parts of the model, `ready` comes first, and
    `begin_final_backward` before the last backward pass, or after it where all were inside `no_sync`.

    Attributes:
        group: the ranks that train it together; None for all of the world.
        model: the whole of it, where each rank has it.
        optimizer: for the parameters, or this rank's share of them; learning-rate schedulers take it.
        sharded: whether `gradients` are this rank's share of them, or all.
        gathers: whether `forward` is a collective, which a rank without rows takes part in, too.
    """

    group: Group
    model: nn.Module
    optimizer: torch.optim.Optimizer
    sharded: bool = False
    gathers: bool = False

    @abstractmethod
    def forward(self, inputs: Tensor) -> Tensor:
        """What the whole model returns for this rank's rows."""

    def ready(self) -> None:  # noqa: B027 (not all have something to do)
        """Do what has to be done before forward passes; `forward` does it itself."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward passes add up gradients and need not send anything."""

    @abstractmethod
    def begin_final_backward(self, rows: float, loss_sum: Tensor, waits: bool = True) -> None:
        """The backward pass that follows completes the gradients: they become sums over the ranks.

        rows, loss_sum: this rank's, to be summed as well. waits: whether its end may wait for the sums.
        """

    @abstractmethod
    def synchronize(self) -> tuple[float, float]:
        """Complete the gradients; rows and loss, summed over the ranks."""

    @abstractmethod
    def rescale(self, factor: float) -> None:
        """Multiply the gradients, and what was kept back of them."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """The gradients that this rank's update takes: over the ranks every element once, or all on each."""

    @abstractmethod
    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The elements of `gradients` with the names of their parameters, of each the first."""

    def multiply(self, factor: float) -> None:
        """Multiply the gradients that `update` takes, in its precision where that is higher than theirs."""
        for gradient in self.gradients():
            gradient.mul_(factor)

    def drop(self) -> None:
        """Forget the gradients, and what was kept back of them, since the step is skipped."""
        self.zero_grad()

    @abstractmethod
    def update(self) -> None:
        """The optimizer's step; after it every rank computes with the new parameters."""

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer; see `Engine.whole`. Nothing is sent where each rank has all."""
        for name, value in self.model.state_dict().items():
            yield name, value.detach()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Copies of every parameter and buffer; a collective. See `Engine.full_state_dict`."""
        return {name: value.clone() for name, value in self.whole()}

    @abstractmethod
    def held(self) -> ResidentTensors:
        """What this rank holds now."""

    @abstractmethod
    def chunks(self) -> Iterator[TensorBox]:
        """The training state on this rank, in an order that is the same on all ranks of equal places.

        Parameters come as "model.NAME", in the precision in which they are updated; buffers too; each tensor
        of the optimizer's state as "optimizer.NAME.KEY". Replicas hold the same boxes.
        """

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The state that is no tensor: the optimizer's groups by names of parameters, and numbers.

        Under "order", where it is known, the names of parameters in the order in which gradients come: a list
        for each time that some were dealt to buckets, none before the first backward pass.
        """

    @abstractmethod
    def load_settings(self, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take `settings`, and make room for optimizer state, so that `chunks` holds all that is loaded.

        state: for each parameter the keys of its optimizer state, each with its whole shape and dtype.
        """

    def begin_masters(self, exact: Mapping[str, Tensor]) -> None:
        """Before the first step: let master weights begin with these values.

        exact: whole, by the parameters' names, in the masters' dtype; the same on all ranks.
        """
        for chunk in self.chunks():
            value = exact.get(chunk.name.removeprefix("model.")) if chunk.name.startswith("model.") else None
            if value is not None and chunk.tensor.dtype == value.dtype:
                chunk.tensor.copy_(narrowed(value, chunk.offsets, chunk.tensor.shape))

    def loaded(self) -> None:  # noqa: B027 (most strategies have nothing to do)
        """The tensors of `chunks` have been written: have what follows from them be made again.

        A collective: all ranks call it, when all have written.
        """
