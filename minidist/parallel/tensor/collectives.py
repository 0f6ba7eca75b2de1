"""Collectives along any dimension, begun in one place and finished in another.

`comm` gathers and scatters along the first dimension; activations are (B, T, D), cut in T or in D. Each
function begins a collective and returns what finishes it, so that a caller may compute between the two:

    finish = start_all_reduce(x, group, overlap=True)
    ...                                                # compute
    x = finish()

With overlap=False the collective is complete when the function returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.work import Group, ranks_of

Finish = Callable[[], Tensor]


def start_all_reduce(x: Tensor, group: Group, overlap: bool = False) -> Finish:
    """Sum x over the ranks, in place. Sends 2 (n - 1) / n S."""
    return _finish(comm.all_reduce(x, group=group, async_op=overlap), _same)  # type: ignore[call-overload]


def start_all_gather(
    x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None = None, overlap: bool = False
) -> Finish:
    """Join the ranks' x along `dim`. Sends (n - 1) S, where S is that of the largest part.

    sizes: of the ranks' parts; None where they are equal. Smaller parts are padded on the way.
    """
    ranks = len(ranks_of(group))
    front = x.movedim(dim, 0)
    longest = len(front) if sizes is None else max(sizes)
    if len(front) < longest:
        front = torch.cat([front, front.new_zeros(longest - len(front), *front.shape[1:])])
    work = comm.all_gather(front.contiguous(), group=group, async_op=overlap)  # type: ignore[call-overload]

    def joined(gathered: Tensor) -> Tensor:
        if sizes is not None and min(sizes) < longest:
            parts = gathered.view(ranks, longest, *gathered.shape[1:])
            gathered = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return gathered.movedim(0, dim)

    return _finish(work, joined)


def start_reduce_scatter(x: Tensor, dim: int, group: Group, overlap: bool = False) -> Finish:
    """Sum x over the ranks, and keep this rank's part of it along `dim`. Sends (n - 1) / n S."""
    front = x.movedim(dim, 0).contiguous()
    work = comm.reduce_scatter(front, group=group, async_op=overlap)  # type: ignore[call-overload]
    return _finish(work, lambda part: part.movedim(0, dim))


def _finish(result: Any, then: Callable[[Tensor], Tensor]) -> Finish:
    if isinstance(result, comm.Work):
        return lambda: then(result.wait())
    return lambda: then(result)


def _same(x: Tensor) -> Tensor:
    return x
