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

import torch
from torch import Tensor

from minidist.comm.work import rank_in
from minidist.parallel.flat.bucket_layout import BucketLayout, WholeTensors
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.flat.joined_messages import Pieces, exchange
from minidist.parallel.sharding.optimizer.memory_source import MemorySource
from minidist.parallel.training.elementwise_optimizers import Work

Home = tuple[Bucket, int]
"""The bucket that has a parameter's shards, and which of its parameters it is."""


class WholeOnOwners(BucketLayout):
    """Parameters of one dtype, whole on their owners; to the optimizer's slices a bucket of which a rank has
    its share.

    homes: where the shards of each lie, in buckets of the same ranks. tensors: by parameter index.

    Attributes:
        shard: this rank's parameters. reduced: their gradients, from `take_gradients` on.
    """

    frees, frozen = True, False
    reduced: Tensor | None = None

    def __init__(
        self, homes: Sequence[Home], tensors: Sequence[Tensor], memory: MemorySource, work: Work
    ) -> None:
        self._homes, (first, _), self._memory = homes, homes[0], memory
        self.gradient_comm, self.device = first.gradient_comm, first.device
        indices, owners = [bucket.param_indices[at] for bucket, at in homes], self.gradient_comm.owners
        self._rank, self.parameters = rank_in(self.gradient_comm.share_group), [tensors[i] for i in indices]
        super().__init__(indices, tensors, owners, self._rank, deal=WholeTensors(work, owners))
        self.filled = sum(len(span) for _, span in self.ranges())
        self.shard = memory.zeros(self.filled, self.dtype, self.device)
        self.take_values(self.shard)

    def _pieces(self, flats: Sequence[Tensor], whole: Tensor) -> tuple[Pieces, Pieces]:
        """Parts of this rank's shares in `flats`, by their owners; and of what it owns, by the shares' ranks.

        flats: for each parameter, this rank's share of its bucket.
        """
        shards: list[list[Tensor]] = [[] for _ in range(self.owners)]
        wholes: list[list[Tensor]] = [[] for _ in range(self.owners)]
        for (bucket, at), flat, (lies, _) in zip(self._homes, flats, self.spans, strict=True):
            owner, (start, stop) = lies // self.share if self.share else 0, bucket.spans[at]
            for rank in range(self.owners) if owner == self._rank else (self._rank,):
                begin, end = max(start, rank * bucket.share), min(stop, (rank + 1) * bucket.share)
                if begin < end and rank == self._rank:
                    shards[owner].append(flat[begin - bucket.own_range.start : end - bucket.own_range.start])
                if begin < end and owner == self._rank:
                    there = lies - self.own_range.start - start
                    wholes[rank].append(whole[begin + there : end + there])
        return shards, wholes

    def take_gradients(self) -> None:
        """Bring the summed gradients to the owners. A collective."""
        flats = [bucket.reduced for bucket, _ in self._homes if bucket.reduced is not None]
        self.reduced = self._memory.zeros(self.filled, flats[0].dtype, self.device)
        self._exchange(*self._pieces(flats, self.reduced), self.reduced.dtype)

    def take_values(self, whole: Tensor) -> None:
        """Bring the values in the shards to the owners, which write them to `whole`. A collective."""
        self._exchange(*self._pieces([bucket.shard for bucket, _ in self._homes], whole), self.dtype)

    def give_values(self) -> None:
        """Take the owners' values to the shards. A collective."""
        shards, wholes = self._pieces([bucket.shard for bucket, _ in self._homes], self.shard)
        self._exchange(wholes, shards, self.dtype)

    def _exchange(self, sent: Pieces, received: Pieces, dtype: torch.dtype) -> None:
        like = torch.empty(0, dtype=dtype, device=self.device)
        exchange(sent, received, like, self.gradient_comm.share_group)

    def bytes_sent(self) -> int:
        """Bytes that this rank sends in a step: parts of its shards, and of its whole parameters."""
        pieces = self._pieces([bucket.shard for bucket, _ in self._homes], self.shard)
        going, back = (sum(x.numel() for each in p for x in each) for p in pieces)
        kept = sum(x.numel() for x in pieces[0][self._rank])
        reduced = next(bucket.reduced for bucket, _ in self._homes if bucket.reduced is not None)
        return (going - kept) * reduced.dtype.itemsize + (back - kept) * self.dtype.itemsize
