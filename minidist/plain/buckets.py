"""Buckets: data parallelism that sends many gradients in one message.

Every message takes some time however small it is, and a model has hundreds of small parameters. So let
neighbouring gradients share a flat tensor, a bucket, and all-reduce the bucket. Nothing is copied: each
parameter's `.grad` is a view of its bucket, so the backward pass writes right into the message.

A rank sends 2 (n - 1) / n S bytes in a step, as before: n ranks, S bytes of parameters. But it sends fewer
messages, one for each bucket: 7 instead of 69 for the ladder's GPT.

Source: Li et al. 2020, "PyTorch Distributed", section 3.2.2.
Lesson: 10 "Buckets and overlap"
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.plain.gpt import Batch, MakeOptimizer, loss_of, same_weights


def groups_of(parameters: Iterable[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Group neighbours as long as they have at most `limit` elements together."""
    groups: list[list[nn.Parameter]] = [[]]
    for p in parameters:
        if groups[-1] and sum(q.numel() for q in groups[-1]) + p.numel() > limit:
            groups.append([])
        groups[-1].append(p)
    return groups


def bucket_of(parameters: list[nn.Parameter]) -> Tensor:
    """Make a flat tensor of which every parameter's gradient is a view."""
    sizes = [p.numel() for p in parameters]
    bucket = parameters[0].new_zeros(sum(sizes))
    for p, part in zip(parameters, bucket.split(sizes), strict=True):
        p.grad = part.view_as(p)
    return bucket


def train(
    model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer, limit: int = 10_000
) -> list[float]:
    """Train `model` in place on this rank's rows; a bucket has at most `limit` elements (PyTorch: 25 MB)."""
    rank, ranks = comm.rank(), comm.size()
    same_weights(model)
    buckets = [bucket_of(group) for group in groups_of(model.parameters(), limit)]
    optimizer, losses = make_optimizer(model.parameters()), []
    for batch in batches:
        # Compute.
        inputs, targets = (whole.tensor_split(ranks)[rank] for whole in batch)  # (B / n, T)
        for bucket in buckets:
            bucket.zero_()  # and not optimizer.zero_grad(), which would drop the views
        loss = loss_of(model(inputs), targets) * len(inputs) / len(batch[0])
        loss.backward()
        # Communicate.
        for bucket in buckets:
            comm.all_reduce(bucket)
        # Update.
        optimizer.step()
        losses.append(loss.detach())
    return comm.all_reduce(torch.stack(losses)).tolist()
