"""Sharded data parallelism: a table says what every rank keeps whole; of the rest it keeps an n-th.

In data parallelism all ranks hold the same parameters, gradients and optimizer state: n copies of each. ZeRO
gives every element an owner. Only the owner updates the element, so only the owner needs its optimizer state
(ZeRO 1) and the sum of its gradients (ZeRO 2); the others fetch its value when they need it (ZeRO 3).

                   kept whole                     bytes held      bytes that a rank sends in a step
    data parallel  parameters, gradients, state   4 S             2 (n - 1) / n S  all-reduce
    ZeRO 1         parameters, gradients          2 S + 2 S / n   2 (n - 1) / n S  reduce-scatter, all-gather
    ZeRO 2         parameters                     S + 3 S / n     2 (n - 1) / n S  reduce-scatter, all-gather
    ZeRO 3         nothing                        4 S / n         3 (n - 1) / n S  and one more all-gather

n ranks; S bytes of parameters, each layer's padded to a multiple of n; AdamW's state. Held: as the backward
pass ends, besides the layer at work. The optimizer has to treat each element by itself, as AdamW does.

Source: Rajbhandari et al. 2020, "ZeRO", section 5.
Lesson: 14 "ZeRO 1, 2, 3"
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from minidist import comm
from minidist.plain.gpt import Batch, MakeOptimizer, loss_of, same_weights


class Keep(NamedTuple):
    """Kept whole on every rank: parameters between steps, gradients until the backward pass is over."""

    parameters: bool
    gradients: bool
    state: bool


TABLE = {
    "data parallel": Keep(parameters=True, gradients=True, state=True),
    "ZeRO 1": Keep(parameters=True, gradients=True, state=False),
    "ZeRO 2": Keep(parameters=True, gradients=False, state=False),
    "ZeRO 3": Keep(parameters=False, gradients=False, state=False),
}


class Unit:
    """A layer's parameters as views of one flat tensor of n k elements; this rank owns k of them, or all."""

    def __init__(self, layer: nn.Module, keep: Keep) -> None:
        self.layer, self.parameters, self.keep = layer, [*layer.parameters()], keep
        self.padding = 0, -sum(p.numel() for p in self.parameters) % comm.size()  # before, after
        self.values = pad(parameters_to_vector(self.parameters).detach(), self.padding)
        vector_to_parameters(self.values, self.parameters)  # makes the parameters views
        own = self.values if keep.state else self.values.chunk(comm.size())[comm.rank()]  # (n k,) or (k,)
        self.own = nn.Parameter(own if keep.parameters else own.clone())  # what the optimizer updates
        # Forward: gather, compute, free. Backward: the output's gradient arrives first: gather, compute. The
        # parameters' gradients arrive, in any order: with the last of them reduce, free.
        self.hooks = [p.register_post_accumulate_grad_hook(self.gradient_arrived) for p in self.parameters]
        if not keep.parameters:
            self.free()
            self.hooks.append(layer.register_forward_pre_hook(lambda *_: self.gather()))
            self.hooks.append(layer.register_forward_hook(self.forward_done))

    def gather(self) -> None:
        """Fetch the values of all owners."""
        self.values.untyped_storage().resize_(self.values.nbytes)
        comm.all_gather(self.own.detach(), out=self.values)  # (k,) to (n k,)

    def free(self) -> None:
        """Free the memory. Parameters and what autograd saved stay views of it, until a gather fills it."""
        self.values.untyped_storage().resize_(0)

    def forward_done(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Free the layer, and gather it again when the backward pass comes to its output."""
        self.free()
        output.register_hook(lambda gradient: self.gather())

    def gradient_arrived(self, p: Tensor) -> None:
        """Reduce the layer's gradients once all of them are there, and free the layer."""
        if not self.keep.gradients and all(p.grad is not None for p in self.parameters):
            self.reduce()
            if not self.keep.parameters:
                self.free()

    def reduce(self) -> None:
        """Add up the gradients of all ranks; keep the sums for what this rank owns, and nothing else."""
        gradient = pad(parameters_to_vector(p.grad for p in self.parameters), self.padding)  # (n k,)
        self.own.grad = comm.all_reduce(gradient) if self.keep.state else comm.reduce_scatter(gradient)
        self.layer.zero_grad()


def train(
    model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer, row: str = "ZeRO 3"
) -> list[float]:
    """Train `model` in place on this rank's rows, with a row of the table."""
    keep, rank, ranks = TABLE[row], comm.rank(), comm.size()
    same_weights(model)
    units = [Unit(layer, keep) for layer in model]
    optimizer, losses = make_optimizer([unit.own for unit in units]), []
    for batch in batches:
        inputs, targets = (whole.tensor_split(ranks)[rank] for whole in batch)  # (B / n, T)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets) * len(inputs) / len(batch[0])
        loss.backward()  # meanwhile the hooks gather, reduce and free what is not kept whole
        if keep.gradients:
            for unit in units:
                unit.reduce()
        optimizer.step()  # each rank updates what it owns
        if keep.parameters and not keep.state:
            for unit in units:
                unit.gather()
        losses.append(loss.detach())
    for unit in units:  # the caller gets a whole model without hooks
        if not keep.parameters:
            unit.gather()
        for hook in unit.hooks:
            hook.remove()
    return comm.all_reduce(torch.stack(losses)).tolist()
