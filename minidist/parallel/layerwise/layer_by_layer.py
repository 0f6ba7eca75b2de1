"""Layer-by-layer model parallelism: each rank holds some of the layers, and one batch goes through them.

Activations go forward from rank to rank, gradients go back. Together the ranks train a model that none of
them could hold. But each rank waits for the one before it, so only one works at a time (4 ranks, over time):

    rank 0  F . . . . . . B
    rank 1  . F . . . . B .
    rank 2  . . F . . B . .
    rank 3  . . . F B . . .

`schedules.plot(schedules.gpipe(4, 1))` draws it to scale. Pipelines (execution.py) fill the dots with more
micro-batches; this is the pipeline with one. `cut` chooses where to cut: the slowest part sets the pace, so
it is made as fast as possible.

Source: Huang et al. 2019, "GPipe", section 1 and figure 2b.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from minidist.comm.work import Group
from minidist.model.loss import cross_entropy
from minidist.parallel.contract.user_functions import Loss
from minidist.parallel.layerwise.balanced_cut import cut_by_weights
from minidist.parallel.pipeline.execution import Pipeline


class LayerByLayer(Pipeline):
    """This rank's part of a model that is cut over the ranks, in a loop of your own.

    >>> layers = [model.layers[i] for i in cut(model.layers, md.size())[md.rank()]]
    >>> parallel = md.LayerByLayer(nn.Sequential(*layers))
    >>> optimizer.zero_grad()
    >>> loss = parallel.step(inputs, targets)  # fills .grad
    >>> optimizer.step()

    All ranks construct it together. `step` and `evaluate` are those of `Pipeline`, with a whole batch at a
    time.

    Args:
        part: this rank's layers. One tensor, or a tuple of them, goes from part to part. Only the parts are
            trained: if the model's `forward` does more than call its layers, `layer_chain.require_chain`
            tells.
        loss: from outputs and targets to a scalar, on the last rank.
        group: the ranks, in the order of the parts; None for all.
    """

    def __init__(self, part: nn.Module, loss: Loss = cross_entropy, group: Group = None) -> None:
        if not isinstance(part, nn.Module):
            raise TypeError(
                f"part is a {type(part).__name__}; give a torch.nn.Module with this rank's layers"
            )
        super().__init__([part], "gpipe", 1, loss, group)

    @property
    def part(self) -> nn.Module:
        """This rank's layers."""
        return self.stages[0]


def cut(
    layers: Sequence[nn.Module] | nn.ModuleList, parts: int, weights: Sequence[float] | None = None
) -> list[range]:
    """Cut a chain of layers into consecutive parts so that the heaviest part is as light as possible.

    Of several such cuts it takes the one with the least sum of squares, whose parts differ least.

    Args:
        layers: in the order in which they run.
        parts: how many, each of at least one layer.
        weights: of the layers, such as the seconds from `measure`; None for their numbers of parameters.

    Returns:
        For each part the indices of its layers.

    Raises:
        ValueError: more parts than layers, negative weights, or not one weight for each layer.
    """
    count = len(layers)
    if not 1 <= parts <= count:
        raise ValueError(f"parts is {parts} and there are {count} layers; give 1 to {count}")
    if weights is None:
        weights = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    if len(weights) != count or not all(0 <= weight < float("inf") for weight in weights):
        raise ValueError(f"weights are {list(weights)}; give one of 0 or more for each of the {count} layers")
    return cut_by_weights(weights, parts)


def measure(layers: Sequence[nn.Module] | nn.ModuleList, inputs: Tensor, repeats: int = 3) -> list[float]:
    """Seconds of a forward and a backward pass of each layer, as weights for `cut`.

    Does not change the gradients of the layers' parameters.

    Args:
        layers: in the order in which they run.
        inputs: of the first layer, a micro-batch as in training.
        repeats: passes through each layer; the fastest one counts.
    """
    synchronize: Callable[[], object] = torch.cuda.synchronize if inputs.is_cuda else (lambda: None)
    seconds = []
    for layer in layers:
        leaf = inputs.detach().requires_grad_(inputs.is_floating_point())
        weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        wanted = [*([leaf] if leaf.requires_grad else []), *weights]
        least = float("inf")
        for _ in range(repeats):
            synchronize()
            begun = time.perf_counter()
            outputs = layer(leaf)
            if wanted and outputs.requires_grad:
                torch.autograd.grad(outputs, wanted, torch.ones_like(outputs), allow_unused=True)
            synchronize()
            least = min(least, time.perf_counter() - begun)
        seconds.append(least)
        inputs = outputs.detach()
    return seconds
