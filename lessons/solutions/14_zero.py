"""Solutions of lesson 14.

The stages are those of Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", section 5; loss scaling and master weights are from Micikevicius et al. 2018, "Mixed
Precision Training", section 3.
"""

from __future__ import annotations

import torch

import minidist as md
from minidist import comm


def state_bytes(parameters: float, ranks: int, stage: int, mixed: bool) -> tuple[float, float, float]:
    """Bytes on one rank: (of parameters, of gradients, of the optimizer)."""
    of_parameters, of_gradients, of_optimizer = (2, 2, 12) if mixed else (4, 4, 8)
    return (
        parameters * of_parameters / (ranks if stage >= 3 else 1),
        parameters * of_gradients / (ranks if stage >= 2 else 1),
        parameters * of_optimizer / (ranks if stage >= 1 else 1),
    )


def scaled_step(
    weight: torch.Tensor, master: torch.Tensor, gradient: torch.Tensor, scale: float, lr: float
) -> float:
    """Change master and weight in place; return the scale for the next step."""
    if not gradient.isfinite().all():
        return scale / 2
    master -= lr * (gradient.float() / scale)  # in float32: the quotient may be too small for float16
    weight.copy_(master)
    return scale


def zero_1_step(
    flat: torch.Tensor, own: torch.Tensor, optimizer: torch.optim.Optimizer, gradient: torch.Tensor
) -> None:
    """Update flat in place, each rank its own part."""
    own.grad = comm.reduce_scatter(gradient, "mean")
    optimizer.step()
    comm.all_gather(own, out=flat)


def reduce_in_buckets(gradients, bucket: int) -> list[torch.Tensor]:
    """The list of this rank's parts, one for each bucket."""
    n = md.size()
    parts, waiting, count = [], [], 0

    def reduce() -> torch.Tensor:  # its names, and what they hold, are gone when it returns
        flat = waiting[0].new_zeros(-(-count // n) * n)
        torch.cat(waiting, out=flat[:count])
        return comm.reduce_scatter(flat, "mean")

    for gradient in gradients:
        if waiting and count + len(gradient) > bucket:
            parts.append(reduce())
            waiting, count = [], 0
        waiting.append(gradient)
        count += len(gradient)
        del gradient  # the list holds it, and this name would hold it longer
    if waiting:
        parts.append(reduce())
    return parts


def zero_3_pass(
    layers: list, parts: list[torch.Tensor], x: torch.Tensor, target: torch.Tensor
) -> list[torch.Tensor]:
    """This rank's parts of the gradients, averaged over all ranks."""
    inputs, own = [], []
    for layer, part in zip(layers, parts, strict=True):
        weights = comm.all_gather(part)
        inputs.append(x)
        x = layer.forward(weights, x)
        del weights  # or it would be there until the next layer has been gathered
    gradient = x - target
    for layer, part in zip(reversed(layers), reversed(parts), strict=True):
        weights = comm.all_gather(part)
        gradient, whole = layer.backward(weights, inputs.pop(), gradient)
        del weights
        own.insert(0, comm.reduce_scatter(whole, "mean"))
        del whole
    return own
