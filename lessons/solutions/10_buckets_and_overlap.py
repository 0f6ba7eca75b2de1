"""Solutions of lesson 10.

Buckets, and reducing while backward runs, are from Li et al. 2020, "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training", section 3.2.
"""

from __future__ import annotations

import torch
from torch.nn import functional

import minidist as md
from minidist import comm


def all_reduce_in_buckets(tensors: list[torch.Tensor], limit: int) -> None:
    """Sum each tensor over the ranks, in place, in flat messages of at most `limit` elements."""
    buckets, held = [[]], 0
    for tensor in tensors:
        if buckets[-1] and held + tensor.numel() > limit:
            buckets.append([])
            held = 0
        buckets[-1].append(tensor)
        held += tensor.numel()
    for bucket in buckets:
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        comm.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def reduce_in_backward(model: torch.nn.Module):
    """Have each gradient start on its way as soon as it is there; returns what ends a step."""
    under_way = []

    def start(parameter: torch.Tensor) -> None:  # called in backward, when parameter.grad is complete
        work = comm.all_reduce(parameter.grad, async_op=True)
        under_way.append((work, parameter))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(start)

    def finish() -> None:
        for work, parameter in under_way:
            work.wait()
            parameter.grad /= md.size()
        under_way.clear()  # the next step begins with none

    return finish


def accumulate_gradients(
    model: torch.nn.Module, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Gradients of the mean loss over all micro-batches of all ranks, sent once."""
    rows = comm.all_reduce(torch.tensor(sum(len(inputs) for inputs, _ in micro_batches)))
    for inputs, targets in micro_batches:
        loss = functional.cross_entropy(model(inputs), targets, reduction="sum") / rows
        loss.backward()  # adds to .grad, and frees what this forward pass kept
    for parameter in model.parameters():
        if parameter.grad is None:  # no micro-batches here, and the others wait for this rank
            parameter.grad = torch.zeros_like(parameter)
        comm.all_reduce(parameter.grad)
