"""The pairs of operators between the parts of a model that all ranks compute and those that they share.

A tensor outside of a shared part is the same on all ranks, and so is its gradient; inside, each rank has a
part of the features, or a summand of the whole. Where activations cross that line a collective runs, forward
or backward. Operators come in pairs: what one does forward the other does backward.

| | forward | backward | where |
|---|---|---|---|
| `copy_to_ranks` | identity | all-reduce | before a column-parallel layer |
| `reduce_from_ranks` | all-reduce | identity | after a row-parallel layer |
| `split_to_ranks` | own part | all-gather | a whole tensor enters |
| `gather_from_ranks` | all-gather | own part | a cut tensor leaves |
| `gather_sequence` | all-gather | reduce-scatter | in place of copy, where the sequence is cut outside |
| `scatter_sequence` | reduce-scatter | all-gather | in place of reduce, there |

The first two are Megatron's f and g: Shoeybi et al. 2019, "Megatron-LM", section 3, figure 3. The last two,
its g and g-bar of sequence parallelism: Korthikanti et al. 2022, section 4.2. They send as many bytes as the
first two, since an all-reduce is a reduce-scatter and an all-gather.

In the docstrings n is the number of ranks and S the bytes of the tensor passed. Results are contiguous, like
those of the layers that stand in one process where these do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.tensor.collectives import start_all_gather, start_all_reduce, start_reduce_scatter
from minidist.parallel.tensor.cuts import share, share_of, sizes_of


def copy_to_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Enter a shared part with a tensor that all ranks have whole.

    Forward: x itself; sends nothing. Backward: the ranks' gradients are summed, an all-reduce, since each has
    seen only its own part's; sends 2 (n - 1) / n S.
    """
    (result,) = copy_all_to_ranks([x], group)
    return result


def copy_all_to_ranks(tensors: Sequence[Tensor], group: Group = None) -> list[Tensor]:
    """The same for several tensors of one dtype, whose gradients travel in one message."""
    return list(_Copy.apply(group, *tensors))  # type: ignore[no-untyped-call]


def reduce_from_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Leave a shared part: each rank has a summand, and gets the sum.

    Forward: an all-reduce; sends 2 (n - 1) / n S. Backward: the gradient itself; sends nothing.
    """
    result: Tensor = _Reduce.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def split_to_ranks(x: Tensor, dim: int = -1, group: Group = None) -> Tensor:
    """Take this rank's part, along `dim`, of a tensor that all ranks have whole.

    Forward: sends nothing. Backward: the ranks' gradients are joined, an all-gather; sends (n - 1) times the
    largest part. Raises ValueError where there are more ranks than elements.
    """
    result: Tensor = _Split.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return result


def gather_from_ranks(x: Tensor, dim: int = -1, size: int | None = None, group: Group = None) -> Tensor:
    """Join the ranks' parts along `dim`.

    Forward: an all-gather; sends (n - 1) times the largest part. Backward: this rank's part of the gradient;
    sends nothing.

    size: of the whole, cut as `split_to_ranks` cuts it; None where all parts are as large as this one. Raises
    ValueError where x is no part of that size.
    """
    ranks, rank = len(ranks_of(group)), rank_in(group)
    whole = x.shape[dim] * ranks if size is None else size
    wanted = len(share_of(whole, rank, ranks))
    if x.shape[dim] != wanted:
        raise ValueError(
            f"x has {x.shape[dim]} elements in dimension {dim}, and rank {rank} of {ranks} has {wanted} of "
            f"{whole}; give the size of the whole, and cut it as split_to_ranks does"
        )
    result: Tensor = _Gather.apply(x, dim, whole, group)  # type: ignore[no-untyped-call]
    return result


def gather_sequence(x: Tensor, dim: int = -2, group: Group = None) -> Tensor:
    """Enter a shared part with this rank's share of a sequence: (..., T / n, D) -> (..., T, D).

    Forward: an all-gather; sends (n - 1) S. Backward: the ranks' gradients are summed, and each keeps its
    share, a reduce-scatter; sends (n - 1) S.
    """
    result: Tensor = _GatherSequence.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return result


def scatter_sequence(x: Tensor, dim: int = -2, group: Group = None) -> Tensor:
    """Leave a shared part with a share of the sequence: summands (..., T, D) -> sums (..., T / n, D).

    Forward: a reduce-scatter; sends (n - 1) / n S. Backward: the ranks' gradients are joined, an all-gather;
    sends (n - 1) / n S. Raises ValueError where the ranks do not divide T.
    """
    check_sequence(x.shape[dim], group)
    result: Tensor = _ScatterSequence.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return result


def check_sequence(length: int, group: Group) -> None:
    """ValueError where the ranks do not divide a sequence of that length."""
    ranks = len(ranks_of(group))
    if length % ranks:
        raise ValueError(
            f"a sequence of {length} tokens is not divided by {ranks} tensor-parallel ranks; pad it to "
            f"{-(-length // ranks) * ranks}, or set sequence_parallel=False"
        )


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if len(grads) == 1:  # a copy: the gradient may be another operator's, too
            return None, start_all_reduce(grads[0].clone(memory_format=torch.contiguous_format), ctx.group)()
        flat = start_all_reduce(torch.cat([grad.reshape(-1) for grad in grads]), ctx.group)()
        parts = torch.split_with_sizes(flat, [grad.numel() for grad in grads])
        return None, *(part.view(grad.shape) for part, grad in zip(parts, grads, strict=True))


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return start_all_reduce(x.clone(memory_format=torch.contiguous_format), group)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, x.shape[dim]
        own = share(ctx.size, group, what=f"dimension {dim}")
        return x.narrow(dim, own.start, len(own)).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sizes = sizes_of(ctx.size, len(ranks_of(ctx.group)))
        return start_all_gather(grad, ctx.dim, ctx.group, sizes)(), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, group: Group) -> Tensor:
        ranks = len(ranks_of(group))
        ctx.dim, ctx.own = dim, share_of(size, rank_in(group), ranks)
        return start_all_gather(x, dim, group, sizes_of(size, ranks))().contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.narrow(ctx.dim, ctx.own.start, len(ctx.own)), None, None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_all_gather(x, dim, group)().contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return start_reduce_scatter(grad, ctx.dim, ctx.group)(), None, None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_reduce_scatter(x, dim, group)().contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return start_all_gather(grad, ctx.dim, ctx.group)(), None, None
