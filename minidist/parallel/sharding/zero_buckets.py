"""Flat buckets that are cut into one share for each rank: parameters, and the gradients that belong to them.

Parameters of one dtype lie one after the other in a flat tensor, and stay views into it. It is padded at the
end and cut into n equal shares, which belong to the n ranks. So a reduce-scatter brings each rank the sum of
its share of the gradients, and an all-gather publishes everyone's share of the updated parameters, with no
copy before or after.

A share may end anywhere if the optimizer looks at each element alone. Any other optimizer gets whole
parameters: they are dealt to the shares by size, the largest first, which pads more.

Source: Rajbhandari et al. 2020, "ZeRO" (see zero.py), sections 5.1 and 5.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from minidist.comm.work import rank_in
from minidist.parallel.flat.buckets import Done, GradientComm, PendingMessage, cut
from minidist.parallel.flat.reassigned_data import addresses, refuse_reassigned


@dataclass(frozen=True)
class ParameterRange:
    """Elements `start` to `stop` of the parameter at `param_index`."""

    param_index: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def evenly(sizes: Sequence[int], ranks: int) -> tuple[list[int], int]:
    """Where each tensor of `sizes` elements begins, one after the other; and the length of a share."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return starts, -(-sum(sizes) // ranks)


def whole(sizes: Sequence[int], ranks: int) -> tuple[list[int], int]:
    """The same where no tensor may be cut: each, the largest first, goes to the share that is emptiest."""
    filled, owners, offsets = [0] * ranks, [0] * len(sizes), [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = min(range(ranks), key=filled.__getitem__)
        offsets[i] = filled[owners[i]]
        filled[owners[i]] += sizes[i]
    share = max(filled, default=0)
    return [owner * share + offset for owner, offset in zip(owners, offsets, strict=True)], share


class ShardBucket:
    """Parameters of one dtype and device with their gradients, in n shares. Making it is a collective.

    param_indices: in the order in which gradients come; the parameters with these indices become views into
    the bucket. cut_anywhere: whether a share may end inside a parameter.
    """

    values: Tensor  # (n share,), the parameters, and zeros between or behind them
    gradients: Tensor | None = None  # (n share,), this rank's own, while it has them
    views: Sequence[Tensor] = ()  # of the parameters' gradients in it
    reduced: Tensor | None = None  # (share,), this rank's share of the gradients, summed over the ranks

    def __init__(
        self,
        param_indices: list[int],
        parameters: Sequence[nn.Parameter],
        gradient_comm: GradientComm,
        cut_anywhere: bool,
    ) -> None:
        self.param_indices = param_indices
        self.parameters = [parameters[index] for index in param_indices]
        first, sizes = self.parameters[0], [parameter.numel() for parameter in self.parameters]
        # Where each parameter begins in `values`, and the elements of a share.
        self.starts, self.share = (evenly if cut_anywhere else whole)(sizes, gradient_comm.ranks)
        self.own = rank_in(gradient_comm.group)
        self.length = gradient_comm.ranks * self.share
        self.values = gradient_comm.zeros(self.length, first.dtype, first.device)
        for parameter, view in zip(self.parameters, self.views_of(self.values), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self._addresses = addresses(self.parameters)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """The parts of `flat`, laid out as `values`, in the parameters' shapes."""
        return [
            flat[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(self.starts, self.parameters, strict=True)
        ]

    def refuse_reassigned(self, name_of: Callable[[nn.Parameter], str]) -> None:
        """ValueError where a parameter is no longer a view into `values`."""
        refuse_reassigned(self.parameters, self._addresses, lambda i: name_of(self.parameters[i]))

    def share_of(self, flat: Tensor) -> Tensor:
        """This rank's share of `flat`."""
        return flat[self.own * self.share : (self.own + 1) * self.share]

    def ranges(self) -> Iterator[tuple[int, ParameterRange]]:
        """The parts of parameters in this rank's share: where in the share each begins, in order."""
        low = self.own * self.share
        spans = zip(self.starts, self.param_indices, self.parameters, strict=True)
        for start, index, size in sorted((start, index, p.numel()) for start, index, p in spans):
            begin, end = max(start, low), min(start + size, low + self.share)
            if begin < end:
                yield begin - low, ParameterRange(index, begin - start, end - start)

    def hold(self, flat: Tensor) -> None:
        """Take `flat`, (n share,), for the gradients; the padding between them becomes zero."""
        end = 0
        spans = sorted((s, p.numel()) for s, p in zip(self.starts, self.parameters, strict=True))
        for start, size in (*spans, (self.length, 0)):
            if end < start:
                flat[end:start] = 0.0
            end = max(end, start + size)
        self.gradients, self.views = flat, self.views_of(flat)

    def gather(self, gradient_comm: GradientComm) -> PendingMessage:
        """Start to publish everyone's share of the parameters; sends (n - 1) / n of the bucket's bytes."""
        if gradient_comm.ranks == 1 or not self.share:
            return Done(self.values)
        return gradient_comm.all_gather(self.share_of(self.values), self.values)

    def bytes_sent(self, ranks: int) -> int:
        """Bytes that a rank sends in a reduce-scatter, and again in an all-gather."""
        return (ranks - 1) * self.share * self.values.element_size()


def buckets_for(
    parameters: Sequence[nn.Parameter],
    order: Sequence[int],
    limit: int,
    gradient_comm: GradientComm,
    cut_anywhere: bool,
) -> list[ShardBucket]:
    """Make buckets of at most `limit` bytes for the parameters at the indices in `order`. A collective.

    Whole parameters get larger buckets, of n times the largest: otherwise the shares of a bucket with a large
    parameter would be mostly padding.
    """
    if not cut_anywhere and order:
        largest = max(parameters[index].numel() * parameters[index].element_size() for index in order)
        limit = max(limit, gradient_comm.ranks * largest)
    return [
        ShardBucket(part, parameters, gradient_comm, cut_anywhere)
        for part in cut(parameters, order, limit)
        if part
    ]


def start_gathering(buckets: Sequence[ShardBucket], gradient_comm: GradientComm) -> list[PendingMessage]:
    """Launch every bucket's all-gather, the last one in this thread."""
    works = []
    for bucket in buckets:
        gradient_comm.blocking = bucket is buckets[-1]
        works.append(bucket.gather(gradient_comm))
    return works
