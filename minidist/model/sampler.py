"""The sampler: which rows form a step's global batch, and which of them belong to this rank.

An epoch's permutation depends only on (seed, epoch), a global batch is the next slice of it, and a rank's
share is a contiguous part of that slice. So the global batches are the same for any number of ranks, ranks
need not communicate, and a run resumes at any step by asking for that step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from minidist._arguments import check_whole
from minidist.model.seeding import generator


class Sampler:
    """Deals `rows` rows in global batches to `ranks` data-parallel ranks, shuffled anew in every epoch.

    Args:
        rows: rows of the data set.
        global_batch: rows that all ranks together take in one step. Shares differ by at most one row, and the
            first ranks have more: 512 rows on 8 ranks are 64 each, 13 on 4 are 4, 3, 3, 3.
        rank, ranks: the index and number of data-parallel ranks; ranks that differ only in tensor, pipeline
            or context parallelism have the same index.
        seed: of the order. Memory: one permutation, 8 bytes a row.
        drop_last: leave out an epoch's last batch if it is smaller than the others.

    Raises TypeError or ValueError if an argument is wrong, or if a rank would get no row in some batch.
    """

    def __init__(
        self,
        rows: int,
        global_batch: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        for name, value in (("rows", rows), ("global_batch", global_batch), ("ranks", ranks)):
            check_whole(name, value, 1)
        if not 0 <= rank < ranks:
            raise ValueError(f"rank is {rank} with {ranks} ranks; give a rank from 0 to {ranks - 1}")
        if ranks > global_batch:
            raise ValueError(
                f"{ranks} ranks are more than a global batch has rows ({global_batch}); "
                f"give a global_batch of at least {ranks}, or fewer ranks"
            )
        full, ragged = divmod(rows, global_batch)
        if drop_last and not full:
            raise ValueError(
                f"drop_last leaves no batch: the data set has {rows} rows and a global batch {global_batch}; "
                f"give a global_batch of at most {rows}, or drop_last=False"
            )
        if not drop_last and 0 < ragged < ranks:
            raise ValueError(
                f"{ranks} ranks are more than the last batch of an epoch has rows ({ragged}: {rows} rows are "
                f"{full} global batches of {global_batch} and {ragged} over); give drop_last=True, another "
                "global_batch, or fewer ranks"
            )
        self.rows, self.global_batch, self.drop_last = rows, global_batch, drop_last
        self.rank, self.ranks, self.seed = rank, ranks, seed
        self.steps_per_epoch = full + (ragged > 0 and not drop_last)
        self._order = (-1, torch.empty(0, dtype=torch.int64))  # the last epoch asked for, and its permutation

    def __len__(self) -> int:
        """The number of steps in an epoch."""
        return self.steps_per_epoch

    def batch(self, step: int) -> Tensor:  # (rows of the global batch,) int64
        """Return the rows of all ranks in `step`.

        Steps count from 0 through all epochs: step len(self) is the first of the second epoch. Raises
        ValueError for a negative step.
        """
        if step < 0:
            raise ValueError(f"step is {step}; steps count from 0")
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.global_batch
        return self._permutation(epoch)[start : start + self.global_batch].clone()

    def share(self, step: int) -> Tensor:  # (this rank's rows,) int64
        """Return this rank's rows in `step`: a contiguous part of batch(step), in its order."""
        return self.batch(step).tensor_split(self.ranks)[self.rank]

    def epoch(self, number: int = 0) -> Iterator[Tensor]:
        """Yield this rank's shares in one epoch: `for indices in sampler.epoch(3): data.train[indices]`."""
        first = number * self.steps_per_epoch
        return (self.share(step) for step in range(first, first + self.steps_per_epoch))

    def _permutation(self, epoch: int) -> Tensor:  # (rows,) int64
        if self._order[0] != epoch:
            shuffled = torch.randperm(self.rows, generator=generator(self.seed, "epoch", epoch), device="cpu")
            self._order = (epoch, shuffled)
        return self._order[1]
