"""Model parallelism at its plainest: the layers are cut into parts, one a rank; a batch goes through them.

Activations go forward from rank to rank, gradients back. A model then fits that no rank could hold; but each
rank waits for the one before it, so that only one works at a time (of 4 ranks, over time):

    rank 0  F . . . . . . B
    rank 1  . F . . . . B .
    rank 2  . . F . . B . .
    rank 3  . . . F B . . .

`schedules.plot(schedules.gpipe(4, 1))` draws it to scale. Pipelines (execution.py) fill the dots, with more
micro-batches. Where to cut is here, too: so that the slowest part, which sets the pace, is as fast as can be.

Source: Huang et al. 2019, "GPipe", section 1 and figure 2b.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.model.loss import cross_entropy
from minidist.parallel.contract.engine import Loss, check_rows
from minidist.parallel.contract.evaluation_mode import evaluating, require_gradients
from minidist.parallel.guards.refusals import require_batch, require_metric
from minidist.parallel.pipeline.stage_messages import receive_unknown, send_unknown
from minidist.parallel.pipeline.stage_passes import changeable


class LayerByLayer:
    """This rank's part of a model that is cut over the ranks, in a loop of your own.

    >>> layers = [model.layers[i] for i in cut(model.layers, md.size())[md.rank()]]
    >>> parallel = md.LayerByLayer(nn.Sequential(*layers))
    >>> optimizer.zero_grad()
    >>> loss = parallel.step(inputs, targets)  # fills .grad
    >>> optimizer.step()

    Args:
        part: this rank's layers. One floating-point tensor goes from part to part. The parts one after the
            other are what is trained: what a model's `forward` does beside its layers is in none of them, see
            `chain.require_chain`.
        loss: from outputs and targets to a scalar, on the last rank.
        group: the ranks, in the order of the parts; None for all.
    """

    def __init__(self, part: nn.Module, loss: Loss = cross_entropy, group: Group = None) -> None:
        if not isinstance(part, nn.Module):
            raise TypeError(
                f"part is a {type(part).__name__}; give a torch.nn.Module with this rank's layers"
            )
        if not callable(loss):
            raise TypeError(f"loss is {loss!r}; give a function from outputs and targets to a scalar")
        self.part, self.loss, self.group = part, loss, group
        self.rank, self.ranks = rank_in(group), len(ranks_of(group))
        self.device = next((p.device for p in part.parameters()), comm.device())

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Forward and backward over a batch: gradients are added to `.grad`.

        Sends the part's output and the gradient of its input, 80 bytes for the output's form, and from the
        last rank 8 (p - 1) for the loss.

        Args:
            inputs: (rows, ...), the same on all ranks; the first takes them.
            targets: (rows, ...), the same on all ranks; the last takes them.

        Returns:
            The loss, the same on all ranks.

        Raises:
            ValueError: no rows, or inputs and targets do not fit.
            TypeError: the part gives no floating-point tensor.
            RuntimeError: gradients are off, as in `torch.no_grad()`.
            CollectiveError: a peer is gone or late.
        """
        check_rows(inputs, targets)
        require_gradients()
        first, last = self.rank == 0, self.rank == self.ranks - 1
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        works: list[comm.Work] = []

        # Forward: wait for the part before, compute, send to the next.
        x = inputs.to(self.device) if first else self._receive().requires_grad_()
        outputs = self.part(changeable(x))
        if last:
            outputs = self.loss(outputs, targets.to(self.device))
            total += outputs.detach().double()
        else:
            works += self._send(outputs)

        # Backward: the other way round.
        gradient = None if last else comm.recv(torch.empty_like(outputs), self.rank + 1, group=self.group)
        if outputs.requires_grad:
            outputs.backward(gradient)
        if not first:
            back = torch.zeros_like(x) if x.grad is None else x.grad
            works.append(comm.send(back, self.rank - 1, group=self.group, async_op=True))
        for work in works:
            work.wait()
        return float(comm.broadcast(total, source=self.ranks - 1, group=self.group))

    def evaluate(self, inputs: Tensor, targets: Tensor, metric: Loss | None = None) -> float:
        """`metric(outputs, targets)` of a batch without training, on all ranks; None for the loss."""
        require_batch(inputs, targets)
        require_metric(metric)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with evaluating([self.part]):
            outputs = self.part(inputs.to(self.device) if self.rank == 0 else self._receive())
            if self.rank == self.ranks - 1:
                total += (metric or self.loss)(outputs, targets.to(self.device)).double()
            else:
                for work in self._send(outputs):
                    work.wait()
        return float(comm.broadcast(total, source=self.ranks - 1, group=self.group))

    def _send(self, outputs: object) -> list[comm.Work]:
        if not isinstance(outputs, Tensor):
            raise TypeError(
                f"part {self.rank} gave a {type(outputs).__name__}; between parts goes one floating-point "
                "tensor"
            )
        return send_unknown(outputs.detach(), self.rank + 1, self.group)

    def _receive(self) -> Tensor:
        return receive_unknown(self.rank - 1, self.group, self.device)


def cut(
    layers: Sequence[nn.Module] | nn.ModuleList, parts: int, weights: Sequence[float] | None = None
) -> list[range]:
    """Cut a chain of layers into consecutive parts, so that the heaviest is as light as can be.

    Of several such cuts it is the one whose parts differ least (the least sum of squares).

    Args:
        layers: in the order in which they run.
        parts: how many, each of at least one layer.
        weights: what each layer weighs, such as the seconds that `measure` gives; None for the number of its
            parameters.

    Returns:
        For each part which layers it has.

    Raises:
        ValueError: more parts than layers, or weights that are negative or not one a layer.
    """
    count = len(layers)
    if not 1 <= parts <= count:
        raise ValueError(f"parts is {parts} and there are {count} layers; give 1 to {count}")
    if weights is None:
        weights = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    if len(weights) != count or not all(0 <= weight < float("inf") for weight in weights):
        raise ValueError(f"weights are {list(weights)}; give one of 0 or more for each of the {count} layers")
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)

    def best(most: float) -> list[tuple[float, list[int]]]:
        """For each number of first layers: the least sum of squares in so many parts, and where to cut."""
        found: list[tuple[float, list[int]]] = [(0.0, [0])] + [(float("inf"), [])] * count
        for part in range(1, parts + 1):
            found = [
                min(
                    (
                        (found[begin][0] + (sums[end] - sums[begin]) ** 2, [*found[begin][1], end])
                        for begin in range(part - 1, end)
                        if found[begin][1] and sums[end] - sums[begin] <= most
                    ),
                    default=(float("inf"), []),
                    key=lambda each: each[0],
                )
                for end in range(count + 1)
            ]
        return found

    # The lightest possible heaviest part is the weight of some run of layers: search among those.
    runs = sorted({sums[end] - sums[begin] for end in range(count + 1) for begin in range(end)})
    low, high = 0, len(runs) - 1
    while low < high:
        middle = (low + high) // 2
        if best(runs[middle])[count][1]:
            high = middle
        else:
            low = middle + 1
    edges = best(runs[low])[count][1]
    return [range(begin, end) for begin, end in pairwise(edges)]


def measure(layers: Sequence[nn.Module] | nn.ModuleList, inputs: Tensor, repeats: int = 3) -> list[float]:
    """Seconds of a forward and a backward pass of each layer, the least of several: weights for `cut`.

    Gradients of the layers' parameters are left as they were.

    Args:
        layers: in the order in which they run.
        inputs: of the first layer, a micro-batch as in training.
        repeats: passes through each layer.
    """
    seconds = []
    for layer in layers:
        leaf = inputs.detach().requires_grad_(inputs.is_floating_point())
        weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        wanted = [*([leaf] if leaf.requires_grad else []), *weights]
        least = float("inf")
        for _ in range(repeats):
            _synchronize(inputs.device)
            begun = time.perf_counter()
            outputs = layer(leaf)
            if wanted and outputs.requires_grad:
                torch.autograd.grad(outputs, wanted, torch.ones_like(outputs), allow_unused=True)
            _synchronize(inputs.device)
            least = min(least, time.perf_counter() - begun)
        seconds.append(least)
        inputs = outputs.detach()
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
