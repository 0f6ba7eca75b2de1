"""Flat buckets that are cut into one share a rank: parameters, and the gradients that belong to them.

Parameters of one dtype lie one after the other in a flat tensor, and stay views into it; n equal shares of
it, padded at the end, belong to the n ranks. So a reduce-scatter brings each rank the sum of its share of the
gradients, and an all-gather brings everyone's share of the updated parameters, with no copy before or after.

An optimizer that looks at each element alone may be cut anywhere. Any other gets whole parameters: dealt to
the shares by size, the largest first, which pads more.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
sections 5.1 and 5.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from minidist.comm.work import rank_in
from minidist.parallel.flat.buckets import Done, GradientComm, PendingMessage, cut
from minidist.parallel.flat.reassigned_data import reassigned


@dataclass(frozen=True)
class ParameterRange:
    """Elements `start` to `stop` of the parameter at `place`."""

    place: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def evenly(sizes: Sequence[int], ranks: int) -> tuple[list[int], int]:
    """Where each tensor of `sizes` elements begins, one after the other; and the length of a share."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return starts, -(-sum(sizes) // ranks)


def whole(sizes: Sequence[int], ranks: int) -> tuple[list[int], int]:
    """The same where no tensor may be cut: each, the largest first, goes to the share that has least."""
    filled, owners, offsets = [0] * ranks, [0] * len(sizes), [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = min(range(ranks), key=filled.__getitem__)
        offsets[i] = filled[owners[i]]
        filled[owners[i]] += sizes[i]
    share = max(filled, default=0)
    return [owner * share + offset for owner, offset in zip(owners, offsets, strict=True)], share


class ShardBucket:
    """Parameters of one dtype and device with their gradients, in n shares. Making it is a collective.

    Args:
        places: the parameters' numbers, in the order in which their gradients come.
        parameters: all parameters, which `places` number; these become views into the bucket.
        exchange: the ranks.
        cut_anywhere: whether a share may end inside a parameter.

    Attributes:
        starts: where each of the parameters begins in `values`.
        share: elements of a rank's share.
        values: (n share,), the parameters, and zeros between or behind them.
        gradients: (n share,), this rank's own, while it has them.
        views: of the parameters' gradients in it.
        reduced: (share,), this rank's share of the gradients, summed over the ranks; after `begin`.
    """

    def __init__(
        self,
        places: list[int],
        parameters: Sequence[nn.Parameter],
        exchange: GradientComm,
        cut_anywhere: bool,
    ) -> None:
        self.places = places
        self.parameters = [parameters[place] for place in places]
        first, sizes = self.parameters[0], [parameter.numel() for parameter in self.parameters]
        self.starts, self.share = (evenly if cut_anywhere else whole)(sizes, exchange.ranks)
        self.own = rank_in(exchange.group)
        self.length = exchange.ranks * self.share
        self.values = exchange.zeros(self.length, first.dtype, first.device)
        self._places = self.views_of(self.values)
        for parameter, view in zip(self.parameters, self._places, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.gradients: Tensor | None = None
        self.views: list[Tensor] = []
        self.reduced: Tensor | None = None

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """The parts of `flat`, which lies like `values`, in the parameters' shapes."""
        return [
            flat[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(self.starts, self.parameters, strict=True)
        ]

    def reassigned(self) -> list[tuple[int, Tensor, Tensor]]:
        """Parameters that lie elsewhere since `parameter.data = tensor`, which are put back, unwritten.

        Returns:
            Of each its place, the view where it lies again, and the values that are to be written there.
        """
        found = reassigned(self.parameters, self._places)
        for number in found:
            self.parameters[number].data = self._places[number]
        return [(self.places[number], self._places[number], value) for number, value in found.items()]

    def share_of(self, flat: Tensor) -> Tensor:
        """This rank's share of `flat`."""
        return flat[self.own * self.share : (self.own + 1) * self.share]

    def fragments(self) -> Iterator[tuple[int, ParameterRange]]:
        """What lies in this rank's share: where in it each begins, and what it is, in order."""
        low = self.own * self.share
        spans = zip(self.starts, self.places, self.parameters, strict=True)
        for start, place, parameter in sorted((start, place, p.numel()) for start, place, p in spans):
            begin, end = max(start, low), min(start + parameter, low + self.share)
            if begin < end:
                yield begin - low, ParameterRange(place, begin - start, end - start)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Where nothing lies."""
        end = 0
        for start, size in sorted((s, p.numel()) for s, p in zip(self.starts, self.parameters, strict=True)):
            if end < start:
                yield end, start
            end = max(end, start + size)
        if end < self.length:
            yield end, self.length

    def hold(self, flat: Tensor) -> None:
        """Take `flat`, (n share,), for the gradients; what lies between them becomes zero."""
        for begin, end in self.gaps():
            flat[begin:end] = 0.0
        self.gradients, self.views = flat, self.views_of(flat)

    def gather(self, exchange: GradientComm) -> PendingMessage:
        """Start to bring everyone's share of the parameters to all.

        Each rank sends (n - 1) / n of the bucket's bytes.
        """
        if exchange.ranks == 1 or not self.share:
            return Done(self.values)
        return exchange.all_gather(self.share_of(self.values), self.values)

    def bytes_sent(self, ranks: int) -> int:
        """Bytes that a rank sends in a reduce-scatter, and in an all-gather."""
        return (ranks - 1) * self.share * self.values.element_size()


def buckets_for(
    parameters: Sequence[nn.Parameter],
    order: Iterable[int],
    limit: int,
    exchange: GradientComm,
    cut_anywhere: bool,
) -> list[ShardBucket]:
    """Buckets of at most `limit` bytes for the parameters at the places in `order`. A collective.

    Whole parameters get larger buckets, of n times the largest, or the shares of a bucket that holds a large
    one would be mostly padding.
    """
    places = [*order]
    if not cut_anywhere and places:
        largest = max(parameters[place].numel() * parameters[place].element_size() for place in places)
        limit = max(limit, exchange.ranks * largest)
    return [
        ShardBucket(part, parameters, exchange, cut_anywhere)
        for part in cut(parameters, places, limit)
        if part
    ]


def start_gathering(buckets: Sequence[ShardBucket], exchange: GradientComm) -> list[PendingMessage]:
    """Launch every bucket's all-gather, the last one in this thread."""
    works = []
    for bucket in buckets:
        exchange.nothing_left = bucket is buckets[-1]
        works.append(bucket.gather(exchange))
    return works
