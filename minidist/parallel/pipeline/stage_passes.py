"""Carry out the instructions of a schedule: forward and backward passes of a rank's stages.

Source: Huang et al. 2019, "GPipe", section 2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minidist.parallel.contract.engine import Loss
from minidist.parallel.pipeline.instructions import Instruction, stage_of
from minidist.parallel.pipeline.split_backward import SplitBackward
from minidist.parallel.pipeline.stage_messages import StageMessages
from minidist.parallel.training.recompute import recomputes


class _Changeable(torch.autograd.Function):
    """The identity, in the same memory, with an output that is neither a leaf nor a view of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Detach: a view of a leaf could not be written to either."""
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Pass the gradient on."""
        return gradients[0]


def changeable(x: Tensor) -> Tensor:
    """A stage's input as a tensor that a layer may change in place, as `nn.ReLU(inplace=True)` does.

    torch refuses to change a leaf that requires a gradient, which a received input is. Nobody else needs that
    input, so it is not copied.
    """
    if not x.requires_grad:
        return x
    result: Tensor = _Changeable.apply(x)  # type: ignore[no-untyped-call]
    return result


@dataclass
class StagePass:
    """A micro-batch in a stage, between its forward and its backward pass."""

    x: Tensor | None  # the stage's input, if it needs a gradient
    root: GradientEdge | None = None  # where the backward pass begins; None if nothing is trained
    split: SplitBackward | None = None


@dataclass
class StagePasses:
    """One execution of a schedule on this rank: the batch, and the tensors that wait between two passes."""

    stages: Sequence[nn.Module]  # this rank's, by chunk
    rank: int
    ranks: int
    device: torch.device
    inputs: Sequence[Tensor]  # for each micro-batch
    targets: Sequence[Tensor]
    loss: Loss
    total: Tensor  # the sum of the losses so far, each times its rows
    weight: Callable[[int], float] | None = None  # factor on a loss before its backward pass, from its rows
    by_rows: bool = True  # whether the loss is a mean over rows; a sum is added without a factor
    live: dict[tuple[int, int], StagePass] = field(default_factory=dict)
    arrived: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)  # inputs and gradients to come
    leaving: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)  # outputs and gradients to send

    def execute(self, each: Instruction, messages: StageMessages) -> None:
        """Carry out one instruction."""
        role, _, kind = each.kind.partition("_")
        which = (each.micro_batch, each.chunk)
        key = (kind, *which)
        if role == "recv":
            self.arrived[key] = messages.receive(each)
        elif role == "send":
            messages.send(each, self.leaving.pop(key))
            messages.post()
        elif role == "forward":
            self._forward(*which)
        elif kind == "weight":
            split = self.live.pop(which).split
            if split is not None:
                split.weight_gradients()
        else:
            self._backward(*which, split=kind == "input")

    def _forward(self, micro_batch: int, chunk: int) -> None:
        stage = stage_of(self.rank, chunk, self.ranks)
        if stage == 0:
            x = self.inputs[micro_batch].to(self.device)
        else:
            x = self.arrived.pop(("forward", micro_batch, chunk))
        train = torch.is_grad_enabled()
        if train and stage:
            x.requires_grad_()
        outputs = self.stages[chunk](changeable(x))
        if stage == self.ranks * len(self.stages) - 1:
            rows = len(self.inputs[micro_batch])
            loss = self.loss(outputs, self.targets[micro_batch].to(self.device))
            self.total += loss.detach().double() * (rows if self.by_rows else 1)
            factor = 1.0 if self.weight is None else self.weight(rows)
            root = get_gradient_edge(loss * factor) if loss.requires_grad else None
        else:
            if not isinstance(outputs, Tensor):
                raise TypeError(
                    f"stage {stage} gave a {type(outputs).__name__}; between stages goes one floating-point "
                    "tensor"
                )
            # Keep the edge alone: then the output's memory is free once it is sent, unless a layer saved it.
            root = get_gradient_edge(outputs) if outputs.requires_grad else None
            self._leave("forward", micro_batch, chunk, outputs.detach())
        if train:
            self.live[micro_batch, chunk] = StagePass(x if stage else None, root)

    def _backward(self, micro_batch: int, chunk: int, split: bool) -> None:
        """The whole backward pass, or with `split` its first part, after which the pass stays live."""
        one = self.live[micro_batch, chunk] if split else self.live.pop((micro_batch, chunk))
        gradient = self.arrived.pop(("backward", micro_batch, chunk), None)
        found = None
        if one.root is not None and split:
            one.split = SplitBackward(one.root, one.x, recomputes(self.stages[chunk]))
            found = one.split.input_gradient(gradient)
        elif one.root is not None:
            torch.autograd.backward([one.root], [gradient])
            found = None if one.x is None else one.x.grad
        if one.x is not None:
            self._leave("backward", micro_batch, chunk, torch.zeros_like(one.x) if found is None else found)

    def _leave(self, kind: str, micro_batch: int, chunk: int, x: Tensor) -> None:
        """Keep a tensor until it is sent, or with one rank give it to the rank's own next chunk."""
        if self.ranks == 1:
            self.arrived[kind, micro_batch, chunk + (1 if kind == "forward" else -1)] = x
        else:
            self.leaving[kind, micro_batch, chunk] = x
