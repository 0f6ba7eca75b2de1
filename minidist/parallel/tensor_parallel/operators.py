"""The collectives between the parts of a model that every rank computes and the parts that ranks share.

Outside a shared part, a tensor and its gradient are the same on all ranks. Inside, each rank has some of the
features, or one summand of the whole. An operator takes activations across that line. Operators come in
pairs: the forward pass of one is the backward pass of the other. So they have derivatives of any order.

| | forward | backward | where |
|---|---|---|---|
| `copy_to_ranks` | identity | all-reduce | before a column-parallel layer |
| `reduce_from_ranks` | all-reduce | identity | after a row-parallel layer |
| `split_to_ranks` | own part | all-gather | a whole tensor enters |
| `gather_from_ranks` | all-gather | own part | a cut tensor leaves |
| `gather_sequence` | all-gather | reduce-scatter | instead of copy, if the sequence is cut outside |
| `scatter_sequence` | reduce-scatter | all-gather | instead of reduce, likewise |

The first two are Megatron's f and g: Shoeybi et al. 2019, "Megatron-LM", section 3, figure 3. The last two
are the g and g-bar of sequence parallelism: Korthikanti et al. 2022, section 4.2. They send as many bytes as
the first two, since an all-reduce is a reduce-scatter and an all-gather.

n is the number of ranks, S the bytes of the tensor that is passed. Results are contiguous. `minidist.comm`
works along the first dimension, but activations (B, T, D) are cut in T or D, so the `start_...` functions
work along any. They return a function that finishes the collective, so that the caller can compute in
between; with overlap=False the collective is already complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.opaque import opaque, refuse_transforms
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.tensor_parallel.cuts import own_range
from minidist.parallel.tensor_parallel.shares import share_of, sizes_of

Finish = Callable[[], Tensor]


def copy_to_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Enter a shared part with a tensor that every rank has whole.

    Forward: returns x, sends nothing. Backward: an all-reduce sums the ranks' gradients, since each rank has
    seen only its own part; sends 2 (n - 1) / n S.
    """
    (result,) = copy_all_to_ranks([x], group)
    return result


@opaque
def copy_all_to_ranks(tensors: Sequence[Tensor], group: Group = None) -> list[Tensor]:
    """Do the same for several tensors of one dtype; their gradients travel in one message."""

    def summed(*grads: Tensor) -> tuple[Tensor, ...]:
        # All-reduce a copy, even of a single gradient: another operator may use it.
        flat = start_all_reduce(torch.cat([x.reshape(-1) for x in grads]), group)()
        parts = torch.split_with_sizes(flat, [x.numel() for x in grads])
        return tuple(part.view(x.shape) for part, x in zip(parts, grads, strict=True))

    return [*_Pair.apply(lambda *xs: tuple(x.view_as(x) for x in xs), summed, *tensors)]


def reduce_from_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Leave a shared part: each rank passes a summand and gets the sum.

    Forward: an all-reduce; sends 2 (n - 1) / n S. Backward: returns the gradient, sends nothing.
    """
    return _pair(x, lambda x: start_all_reduce(_copied(x), group)(), lambda grad: grad)


def split_to_ranks(x: Tensor, dim: int = -1, group: Group = None) -> Tensor:
    """Take this rank's part, along `dim`, of a tensor that every rank has whole.

    Forward: sends nothing. Backward: an all-gather of the gradients; sends (n - 1) times the largest part.
    Raises ValueError if there are more ranks than elements.
    """
    own = own_range(x.shape[dim], group, what=f"dimension {dim}")
    sizes = sizes_of(x.shape[dim], len(ranks_of(group)))
    return _pair(
        x,
        lambda x: _copied(x.narrow(dim, own.start, len(own))),
        lambda grad: start_all_gather(grad, dim, group, sizes)(),
    )


def gather_from_ranks(x: Tensor, dim: int = -1, size: int | None = None, group: Group = None) -> Tensor:
    """Join the ranks' parts along `dim`.

    Forward: an all-gather; sends (n - 1) times the largest part. Backward: this rank's part of the gradient;
    sends nothing. `size` is that of the whole tensor, cut as by `split_to_ranks`; None if all parts are as
    large as this one. Raises ValueError if x does not have this rank's size.
    """
    ranks, rank = len(ranks_of(group)), rank_in(group)
    whole = x.shape[dim] * ranks if size is None else size
    own, sizes = share_of(whole, rank, ranks), sizes_of(whole, ranks)
    if x.shape[dim] != len(own):
        raise ValueError(
            f"x has {x.shape[dim]} elements in dimension {dim}, and rank {rank} of {ranks} has {len(own)} of "
            f"{whole}; give the size of the whole, and cut it as split_to_ranks does"
        )
    return _pair(
        x,
        lambda x: start_all_gather(x, dim, group, sizes)().contiguous(),
        lambda grad: grad.narrow(dim, own.start, len(own)),
    )


def gather_sequence(x: Tensor, dim: int = -2, group: Group = None) -> Tensor:
    """Enter a shared part with this rank's share of a sequence: (..., T / n, D) -> (..., T, D).

    Forward: an all-gather; sends (n - 1) S. Backward: a reduce-scatter sums the gradients; sends (n - 1) S.
    """
    return _pair(
        x,
        lambda x: start_all_gather(x, dim, group)().contiguous(),
        lambda grad: start_reduce_scatter(grad, dim, group)(),
    )


def scatter_sequence(x: Tensor, dim: int = -2, group: Group = None) -> Tensor:
    """Leave a shared part with a share of the sequence: summands (..., T, D) -> sums (..., T / n, D).

    Forward: a reduce-scatter; sends (n - 1) / n S. Backward: an all-gather of the gradients; sends (n - 1) /
    n S. Raises ValueError if the number of ranks does not divide T.
    """
    check_sequence(x.shape[dim], group)
    return _pair(
        x,
        lambda x: start_reduce_scatter(x, dim, group)().contiguous(),
        lambda grad: start_all_gather(grad, dim, group)(),
    )


OPERATORS = (copy_to_ranks, reduce_from_ranks), (gather_sequence, scatter_sequence)
"""How to enter and to leave a shared part, without and with sequence parallelism."""


def check_sequence(length: int, group: Group) -> None:
    """Raise ValueError if the number of ranks does not divide a sequence of this length."""
    ranks = len(ranks_of(group))
    if length % ranks:
        raise ValueError(
            f"a sequence of {length} tokens is not divided by {ranks} tensor-parallel ranks; pad it to "
            f"{-(-length // ranks) * ranks}, or set sequence_parallel=False"
        )


def start_all_reduce(x: Tensor, group: Group, overlap: bool = False) -> Finish:
    """Sum x over the ranks, in place. Sends 2 (n - 1) / n S."""
    work = comm.all_reduce(x, group=group, async_op=overlap)
    return _finish(work, lambda total: total)


def start_all_gather(
    x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None = None, overlap: bool = False
) -> Finish:
    """Join the ranks' x along `dim`. Sends (n - 1) times the bytes of the largest part.

    sizes: of the ranks' parts, None if they are equal. Smaller parts are padded for the message.
    """
    ranks = len(ranks_of(group))
    front = x.movedim(dim, 0)
    longest = len(front) if sizes is None else max(sizes)
    if len(front) < longest:
        front = torch.cat([front, front.new_zeros(longest - len(front), *front.shape[1:])])
    work = comm.all_gather(front.contiguous(), group=group, async_op=overlap)

    def joined(gathered: Tensor) -> Tensor:
        if sizes is not None and min(sizes) < longest:
            parts = gathered.view(ranks, longest, *gathered.shape[1:])
            gathered = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return gathered.movedim(0, dim)

    return _finish(work, joined)


def start_reduce_scatter(x: Tensor, dim: int, group: Group, overlap: bool = False) -> Finish:
    """Sum x over the ranks, and keep this rank's part of the sum along `dim`. Sends (n - 1) / n S."""
    front = x.movedim(dim, 0).contiguous()
    work = comm.reduce_scatter(front, group=group, async_op=overlap)
    return _finish(work, lambda part: part.movedim(0, dim))


def _finish(result: Any, then: Callable[[Tensor], Tensor]) -> Finish:
    if isinstance(result, comm.Work):
        return lambda: then(result.wait())
    return lambda: then(result)


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@opaque
def _pair(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `forward` to x, and `backward` to the gradient."""
    result: Tensor = _Pair.apply(forward, backward, x)
    return result


class SharedFunction(torch.autograd.Function):
    """A function in which ranks take part."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Compute it; NotImplementedError inside torch.func."""
        refuse_transforms("tensor parallelism")
        return super().apply(*args)  # type: ignore[no-untyped-call]


class _Pair(SharedFunction):
    """Functions of one tensor, or of several that return as many, for the two directions."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], *xs: Tensor) -> Any:
        ctx.pair = forward, backward
        return forward(*xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        forward, backward = ctx.pair
        found = _Pair.apply(backward, forward, *grads)
        return None, None, *(found if isinstance(found, tuple) else (found,))
