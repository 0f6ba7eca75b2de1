"""Parameters of which every rank has a shard, whole on an owner each while the optimizer updates them.

With ZeRO 3 a shard begins and ends in the middle of a matrix, and orthogonalizing a part of a matrix is other
mathematics. So each such parameter has an owner, which keeps its state and a copy of its values. Before the
update an all-to-all brings it the parts of the gradient; after it another one takes the values to the shards.
A rank sends what it has of others' parameters, and what others have of its own: about (n - 1) / n^2 of the
elements of all such parameters each time.

Source: Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.3 (gather, update, keep a part).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minidist.parallel.flat.bucket_layout import WholeTensors
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.flat.joined_messages import Pieces, exchange
from minidist.parallel.flat.values import GatheredValues
from minidist.parallel.sharding.optimizer.memory_source import MemorySource
from minidist.parallel.training.elementwise_optimizers import UpdateWork

Home = tuple[Bucket[GatheredValues], int]
"""The bucket that has a parameter's shards, and which of its parameters it is."""


class OwnedValues(NamedTuple):
    """The values of the parameters that this rank owns."""

    shard: Tensor
    frees: bool = True


class OwnedGradients(NamedTuple):
    """The summed gradients of the parameters that this rank owns."""

    reduced: Tensor


class WholeOnOwners:
    """Parameters of one dtype, whole on their owners; to the optimizer's slices a bucket of which a rank has
    its share.

    homes: where the shards of each lie, in buckets of the same ranks. tensors: by parameter index.

    Attributes:
        gradients: from `take_gradients` to `forget_gradients`.
    """

    gradients: OwnedGradients | None = None

    def __init__(
        self, homes: Sequence[Home], tensors: Sequence[Tensor], memory: MemorySource, work: UpdateWork
    ) -> None:
        self._homes, (first, _), self._memory = homes, homes[0], memory
        self._over, self._device = first.values.gradient_comm, first.device
        indices = [bucket.layout.param_indices[at] for bucket, at in homes]
        self.parameters = [tensors[index] for index in indices]
        self.layout = self._over.layout(indices, tensors, WholeTensors(work, self._over.owners))
        self._filled = sum(len(span) for _, span in self.layout.ranges())
        self.values = OwnedValues(memory.zeros(self._filled, self.layout.dtype, self._device))
        self.take_values(self.values.shard)

    def _pieces(self, flats: Sequence[Tensor], whole: Tensor) -> tuple[Pieces, Pieces]:
        """Parts of this rank's shares in `flats`, by their owners; and of what it owns, by the shares' ranks.

        flats: for each parameter, this rank's share of its bucket.
        """
        own, owners = self.layout, self.layout.owners
        shards: list[list[Tensor]] = [[] for _ in range(owners)]
        wholes: list[list[Tensor]] = [[] for _ in range(owners)]
        for (bucket, at), flat, (lies, _) in zip(self._homes, flats, own.spans, strict=True):
            owner, home = lies // own.share if own.share else 0, bucket.layout
            start, stop = home.spans[at]
            for rank in range(owners) if owner == own.rank else (own.rank,):
                begin, end = max(start, rank * home.share), min(stop, (rank + 1) * home.share)
                if begin < end and rank == own.rank:
                    shards[owner].append(flat[begin - home.own_range.start : end - home.own_range.start])
                if begin < end and owner == own.rank:
                    there = lies - own.own_range.start - start
                    wholes[rank].append(whole[begin + there : end + there])
        return shards, wholes

    def take_gradients(self) -> None:
        """Bring the summed gradients to the owners. A collective."""
        flats = [bucket.gradients.reduced for bucket, _ in self._homes if bucket.gradients is not None]
        whole = self._memory.zeros(self._filled, flats[0].dtype, self._device)
        self._exchange(*self._pieces(flats, whole), whole.dtype)
        self.gradients = OwnedGradients(whole)

    def forget_gradients(self) -> None:
        """Give their memory back."""
        self.gradients = None

    def take_values(self, whole: Tensor) -> None:
        """Bring the values in the shards to the owners, which write them to `whole`. A collective."""
        self._exchange(*self._pieces(self._shards(), whole), self.layout.dtype)

    def give_values(self) -> None:
        """Take the owners' values to the shards. A collective."""
        shards, wholes = self._pieces(self._shards(), self.values.shard)
        self._exchange(wholes, shards, self.layout.dtype)

    def _shards(self) -> list[Tensor]:
        return [bucket.values.shard for bucket, _ in self._homes]

    def _exchange(self, sent: Pieces, received: Pieces, dtype: torch.dtype) -> None:
        like = torch.empty(0, dtype=dtype, device=self._device)
        exchange(sent, received, like, self._over.share_group)

    def bytes_sent(self) -> int:
        """Bytes that this rank sends in a step: parts of its shards, and of its whole parameters."""
        pieces = self._pieces(self._shards(), self.values.shard)
        going, back = (sum(x.numel() for each in p for x in each) for p in pieces)
        kept, (bucket, _) = sum(x.numel() for x in pieces[0][self.layout.rank]), self._homes[0]
        assert bucket.gradients is not None
        summed = bucket.gradients.reduced.dtype
        return (going - kept) * summed.itemsize + (back - kept) * self.layout.dtype.itemsize
