"""Overlap: send a bucket of gradients while the backward pass still computes the others.

The backward pass goes from the last layer to the first, so the last layers' gradients are complete long
before it ends. PyTorch calls a hook when a parameter's gradient is complete. The hook for the last gradient
of a bucket launches the bucket's all-reduce without waiting for it. The rank waits after the backward pass,
when most messages have arrived.

A rank sends 2 (n - 1) / n S bytes in a step, as before: n ranks, S bytes of parameters. Only the last bucket,
that of the first layers, has no computation left to hide behind.

Source: Li et al. 2020, "PyTorch Distributed", section 3.2.3.
Lesson: 10 "Buckets and overlap"
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.plain.gpt import Batch, MakeOptimizer, loss_of, same_weights


class Bucket:
    """Gradients as views of one flat tensor, which is sent as soon as all of them have arrived."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        sizes = [p.numel() for p in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes))
        self.count = self.missing = len(parameters)
        for p, part in zip(parameters, self.flat.split(sizes), strict=True):
            p.grad = part.view_as(p)
        self.hooks = [p.register_post_accumulate_grad_hook(self.arrived) for p in parameters]

    def arrived(self, p: Tensor) -> None:
        """Count a gradient, and launch with the last: in the same order on all ranks, as collectives need."""
        self.missing -= 1
        if self.missing == 0:
            self.work = comm.all_reduce(self.flat, async_op=True)

    def wait(self) -> None:
        """Wait until the bucket holds the sums over all ranks."""
        self.work.wait()
        self.missing = self.count


def groups_of(parameters: Iterable[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Group neighbours as long as they have at most `limit` elements together, as in buckets.py."""
    groups: list[list[nn.Parameter]] = [[]]
    for p in parameters:
        if groups[-1] and sum(q.numel() for q in groups[-1]) + p.numel() > limit:
            groups.append([])
        groups[-1].append(p)
    return groups


def train(
    model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer, limit: int = 10_000
) -> list[float]:
    """Train `model` in place on this rank's rows; a bucket has at most `limit` elements (PyTorch: 25 MB)."""
    rank, ranks = comm.rank(), comm.size()
    same_weights(model)
    # Buckets go from the last layer to the first, as gradients arrive.
    buckets = [Bucket(group) for group in groups_of(reversed([*model.parameters()]), limit)]
    optimizer, losses = make_optimizer(model.parameters()), []
    for batch in batches:
        inputs, targets = (whole.tensor_split(ranks)[rank] for whole in batch)  # (B / n, T)
        for bucket in buckets:
            bucket.flat.zero_()
        # Compute and launch: the backward pass calls `arrived`.
        loss = loss_of(model(inputs), targets) * len(inputs) / len(batch[0])
        loss.backward()
        # Wait.
        for bucket in buckets:
            bucket.wait()
        # Update.
        optimizer.step()
        losses.append(loss.detach())
    for hook in [hook for bucket in buckets for hook in bucket.hooks]:
        hook.remove()  # else a later backward pass would send gradients, too
    return comm.all_reduce(torch.stack(losses)).tolist()
