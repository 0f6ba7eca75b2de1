"""Settings of `zero`: steps of ZeRO 1, gradients that come one by one, and layers that ranks share.

Each has the inputs of all ranks, the function that runs in a rank, and the right result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch

import minidist as md
from checks.ranks import Case, Run
from checks.support.live_bytes import Live
from checks.support.words import number, plural


def _sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _adam(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


OPTIMIZERS = {"sgd": _sgd, "adam": _adam}


def step_cases(draw: np.random.Generator, ranks: int) -> list[Case]:
    """Parameters, three gradients of each rank, and the optimizer's kind."""
    cases = []
    # Adam's steps are as long for any multiple of a gradient, and hide a sum for a mean: SGD is first.
    for size, kind in ((ranks, "sgd"), (3 * ranks, "adam"), (int(draw.integers(5, 20)) * ranks, "sgd")):
        flat = torch.from_numpy(draw.normal(size=size))
        steps = [torch.from_numpy(draw.normal(size=(3, size))) for _ in range(ranks)]
        args = [(flat, steps[rank], kind) for rank in range(ranks)]
        cases.append(Case(args, f"{plural(ranks, 'rank')} with {size} parameters and {kind}"))
    return cases


def three_steps(
    function: Callable[..., Any], flat: torch.Tensor, gradients: torch.Tensor, kind: str
) -> tuple[list[torch.Tensor], int]:
    """In a rank: flat after each step, and the bytes of the optimizer's state."""
    flat = flat.clone()
    own = flat.view(md.size(), -1)[md.rank()]
    optimizer, seen = OPTIMIZERS[kind]([own]), []
    for gradient in gradients:
        function(flat, own, optimizer, gradient.clone())
        seen.append(flat.clone())
    state = optimizer.state.get(own, {})
    return seen, sum(x.nbytes for x in state.values() if isinstance(x, torch.Tensor) and x.dim())


BIG = 1000
"""Elements of a gradient from which on live bytes are compared."""


def lengths(draw: np.random.Generator) -> list[tuple[list[int], int]]:
    """Lengths of gradients and of a bucket, the smallest first."""
    ragged = draw.integers(1, 9, 7).tolist()
    return [
        ([2, 2, 1], 4),
        ([3, 3, 1], 4),
        ([1, 3, 2, 1, 1, 2], 4),
        ([3], 3),
        ([1, 4], 2),
        ([5, 1], 2),
        ([], 5),
        (ragged, int(draw.integers(2, 12))),
        (ragged, 1000),
        ([*draw.integers(BIG // 2, BIG + 1, 48).tolist(), BIG], 2 * BIG),
    ]


def bucket_cases(draw: np.random.Generator, ranks: int) -> list[Case]:
    """Gradients of each rank, and the length of a bucket."""
    cases = []
    for sizes, bucket in lengths(draw):
        args = [([whole_numbers(draw, size) for size in sizes], bucket) for _ in range(ranks)]
        text = f"{plural(ranks, 'rank')} with gradients of lengths {sizes} and bucket={bucket}"
        cases.append(Case(args, text))
    return cases


def whole_numbers(draw: np.random.Generator, *shape: int) -> torch.Tensor:
    """Small whole numbers, none of them 0."""
    return torch.from_numpy(draw.integers(1, 100, shape).astype(np.float32))


def right_buckets(run: Run) -> list[torch.Tensor]:
    """The mean of each bucket, padded to a multiple of the ranks."""
    ranks, (first, bucket) = len(run.results), run.case.args[0]
    gradients = zip(*(args[0] for args in run.case.args), strict=True)
    mean = [sum(of_rank) / ranks for of_rank in gradients]
    sizes = [len(each) for each in first]
    return [padded(torch.cat(mean[a:b]), ranks) for a, b in packed(sizes, bucket)]


def packed(lengths: list[int], bucket: int) -> Iterator[tuple[int, int]]:
    """Of each bucket, its first gradient and the one after its last."""
    first = count = 0
    for index, length in enumerate(lengths):
        if index > first and count + length > bucket:
            yield first, index
            first, count = index, 0
        count += length
    if first < len(lengths):
        yield first, len(lengths)


def padded(flat: torch.Tensor, ranks: int) -> torch.Tensor:
    """With zeros behind it, so that its length is a multiple of the ranks."""
    return torch.nn.functional.pad(flat, (0, -len(flat) % ranks))


def one_by_one(function: Callable[..., Any], gradients: list[torch.Tensor], bucket: int) -> tuple[Any, int]:
    """In a rank: the parts, and the most bytes that lived at a time."""
    with Live(least=4 * BIG // 8) as live:  # smaller ones are the ranks' own business
        parts = function((each.clone() for each in gradients), bucket)
    return parts, live.peak


WIDE = 24
"""Width of the layers of which no more than two may live at a time."""


def layer_cases(draw: np.random.Generator, ranks: int) -> list[Case]:
    """Widths, each rank's parts of the weights, and its own rows and targets."""
    cases = []
    for widths in ([2, 2], [3, 2, 4], draw.integers(2, 7, 4).tolist(), [WIDE] * 6):
        weights = [padded(torch.from_numpy(draw.normal(0, 0.5, a * b)), ranks) for a, b in pairwise(widths)]
        args = []
        for rank in range(ranks):
            ends = widths[0], widths[-1]
            x, target = (torch.from_numpy(draw.normal(size=(2, width))) for width in ends)
            parts = [each.view(ranks, -1)[rank].clone() for each in weights]
            args.append((widths, parts, x, target))
        layers = plural(len(weights), "layer")
        cases.append(Case(args, f"{plural(ranks, 'rank')} with {layers} of widths {widths}"))
    return cases


class Squared:
    """The check's own layer: y = (x @ w) ** 2, with w as a flat tensor, perhaps padded."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.shape, self.size = (inputs, outputs), inputs * outputs

    def forward(self, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Of x (rows, inputs)."""
        return (x @ self._matrix(weights)) ** 2

    def backward(
        self, weights: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From the gradient of y: that of x, and that of weights."""
        matrix = self._matrix(weights)
        inner = gradient * 2 * (x @ matrix)
        whole = torch.zeros_like(weights)
        torch.mm(x.T, inner, out=whole[: self.size].view(self.shape))
        return inner @ matrix.T, whole

    def _matrix(self, weights: torch.Tensor) -> torch.Tensor:
        if weights.dim() != 1 or len(weights) < self.size:
            raise ValueError(
                f"this layer has {self.size} weights, and was given {number(weights.numel())} of shape "
                f"{tuple(weights.shape)}: gather the parts of all ranks first"
            )
        return weights[: self.size].view(self.shape)


def through_layers(
    function: Callable[..., Any],
    widths: list[int],
    parts: list[torch.Tensor],
    x: torch.Tensor,
    target: torch.Tensor,
) -> tuple[Any, int]:
    """In a rank: its parts of the gradients, and the most bytes that lived at a time."""
    layers = [Squared(a, b) for a, b in pairwise(widths)]
    parts = [part.clone() for part in parts]
    with Live(least=8 * WIDE * WIDE) as live:
        own = function(layers, parts, x.clone(), target)
    return own, live.peak


def right_gradients(run: Run) -> tuple[torch.Tensor, ...]:
    """The gradients of all weights of the mean loss, in one process."""
    layers = [Squared(a, b) for a, b in pairwise(run.case.args[0][0])]
    weights = [torch.cat([args[1][i] for args in run.case.args]).requires_grad_() for i in range(len(layers))]
    loss = torch.zeros((), dtype=torch.float64)
    for _, _, x, target in run.case.args:
        for layer, each in zip(layers, weights, strict=True):
            x = layer.forward(each, x)
        loss = loss + 0.5 * ((x - target) ** 2).sum() / len(run.results)
    return torch.autograd.grad(loss, weights)
