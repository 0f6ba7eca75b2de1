"""Sparse gradients, as from `nn.Embedding(..., sparse=True)`: gather indices and values from all ranks.

A batch uses few rows of a large table. An all-reduce would send the whole table. An all-gather sends only the
rows that were used and their indices, and every rank adds them up.

Source: Horovod's all-reduce of sparse tensors (Sergeev and Del Balso 2018, "Horovod: fast and easy
distributed deep learning in TensorFlow").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from minidist.parallel.flat.gradients import GradientComm, PendingMessage


def gather_sparse(
    gradient_comm: GradientComm, parameters: Sequence[nn.Parameter], scale: float
) -> Iterator[PendingMessage]:
    """Sum sparse gradients over the ranks, each multiplied by `scale`; in steps, as `Reduction.run`.

    A rank without a gradient takes part with no rows. For each gradient a rank sends the number of rows,
    their indices and values: (n - 1) (8 + rows (8 + b)) bytes, if a row has b and no rank has more rows.
    """
    ranks = gradient_comm.ranks
    grads = [_coalesced(parameter) for parameter in parameters]
    counts = torch.tensor([len(grad.values()) for grad in grads], device=parameters[0].device)
    work = gradient_comm.all_gather(counts)
    yield work
    rows = work.wait().view(ranks, -1)  # (ranks, parameters)
    longest = rows.amax(dim=0).tolist()

    works = []  # padded, because an all-gather takes the same number of rows from every rank
    for grad, most in zip(grads, longest, strict=True):
        works.append(gradient_comm.all_gather(_padded(grad.indices().t(), most)))
        works.append(gradient_comm.all_gather(_padded(grad.values() * scale, most)))
    yield from works

    for i, parameter in enumerate(parameters):
        indices, values = (work.wait() for work in works[2 * i : 2 * i + 2])
        kept = torch.arange(longest[i], device=rows.device) < rows[:, i, None]  # (ranks, longest)
        parameter.grad = torch.sparse_coo_tensor(
            indices[kept.flatten()].t(), values[kept.flatten()], parameter.shape, check_invariants=False
        ).coalesce()


def _coalesced(parameter: nn.Parameter) -> Tensor:
    """The gradient with each row once, sparse in its first dimension alone; empty if there is none."""
    grad = parameter.grad
    if grad is None:
        grad = parameter.detach().new_zeros(parameter.shape).to_sparse(1)
    elif not grad.is_sparse:
        grad = grad.detach().to_sparse(1)
    return grad.detach().coalesce()


def _padded(x: Tensor, rows: int) -> Tensor:
    padded = x.new_zeros((rows, *x.shape[1:]))
    padded[: len(x)] = x
    return padded
