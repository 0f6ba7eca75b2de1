"""One run of a schedule on a rank: what each instruction does, and which tensors wait between two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minidist.parallel.contract.batch import rows_of, to_device
from minidist.parallel.contract.user_functions import Loss
from minidist.parallel.pipeline.split_backward import SplitBackward
from minidist.parallel.pipeline.stage_messages import StageMessages, Tensors, tensors_to_send
from minidist.parallel.schedules.instructions import Instruction
from minidist.parallel.training.recompute import recomputes


class _Changeable(torch.autograd.Function):
    """The identity, in the same memory. Its output is no leaf, and no view of one."""

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

    xs: list[Tensor]  # the stage's inputs that need a gradient
    roots: list[GradientEdge | None]  # where the backward pass begins; None for what no weight leads to
    split: SplitBackward | None = None


@dataclass
class ScheduleRun:
    """One execution of a schedule on this rank: the batch, and the tensors that wait between two passes."""

    modules: Sequence[nn.Module]  # of this rank's chunks
    stage_numbers: Sequence[int]  # of these chunks, among all of the model's stages
    last: int  # the number of the last stage
    device: torch.device
    inputs: Sequence[Any]  # for each micro-batch
    targets: Sequence[Any]
    loss: Loss
    total: Tensor  # the sum of the losses so far, each times its rows
    weight: Callable[[int], float] | None  # from its rows to the factor on a loss before its backward pass
    by_rows: bool  # whether the loss is a mean over rows; a sum is added without a factor
    live: dict[tuple[int, int], StagePass] = field(default_factory=dict)
    arrived: dict[tuple[str, int, int], Tensors] = field(default_factory=dict)  # inputs, gradients of outputs
    leaving: dict[tuple[str, int, int], Tensors] = field(default_factory=dict)  # outputs, gradients of inputs

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
        stage, module = self.stage_numbers[chunk], self.modules[chunk]
        received = self.arrived.pop(("forward", micro_batch, chunk)) if stage else []
        train = torch.is_grad_enabled()
        xs = [x.requires_grad_() for x in received if train and x.is_floating_point()]
        given = [changeable(x) for x in received]
        if getattr(module, "takes_batch", False):
            outputs = module(given, self._batch(micro_batch))
        elif stage:
            outputs = module(given[0] if len(given) == 1 else tuple(given))
        else:
            outputs = module(self._batch(micro_batch))
        if stage == self.last:
            rows = rows_of(self.inputs[micro_batch])
            loss = self.loss(outputs, to_device(self.targets[micro_batch], self.device))
            self.total += loss.detach().double() * (rows if self.by_rows else 1)
            factor = 1.0 if self.weight is None else self.weight(rows)
            roots = [get_gradient_edge(loss * factor) if loss.requires_grad else None]
        else:
            sent = tensors_to_send(stage, outputs)
            # Keep the edges alone: then an output's memory is free once it is sent, unless a layer saved it.
            roots = [get_gradient_edge(x) if x.requires_grad else None for x in sent if x.is_floating_point()]
            self._leave("forward", micro_batch, chunk, [x.detach() for x in sent])
        if train:
            self.live[micro_batch, chunk] = StagePass(xs, roots)

    def _batch(self, micro_batch: int) -> Any:
        return to_device(self.inputs[micro_batch], self.device)

    def _backward(self, micro_batch: int, chunk: int, split: bool) -> None:
        """The whole backward pass, or with `split` its first part, after which the pass stays live."""
        one = self.live[micro_batch, chunk] if split else self.live.pop((micro_batch, chunk))
        gradients = self.arrived.pop(("backward", micro_batch, chunk), [None])
        pairs = [(root, g) for root, g in zip(one.roots, gradients, strict=True) if root is not None]
        found: Sequence[Tensor | None] = [None] * len(one.xs)
        if pairs and split:
            one.split = SplitBackward([root for root, _ in pairs], one.xs, recomputes(self.modules[chunk]))
            found = one.split.input_gradients([gradient for _, gradient in pairs])
        elif pairs:
            torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
            found = [x.grad for x in one.xs]
        if one.xs:
            zeros = (torch.zeros_like(x) if g is None else g for x, g in zip(one.xs, found, strict=True))
            self._leave("backward", micro_batch, chunk, [*zeros])

    def _leave(self, kind: str, micro_batch: int, chunk: int, xs: Tensors) -> None:
        """Keep tensors until they are sent, or give them to the next stage if that is on this rank."""
        stage = self.stage_numbers[chunk] + (1 if kind == "forward" else -1)
        if stage in self.stage_numbers:
            self.arrived[kind, micro_batch, self.stage_numbers.index(stage)] = xs
        else:
            self.leaving[kind, micro_batch, chunk] = xs
