"""Gradients as means over all ranks' rows, for a loop whose ranks may have different numbers of them."""

from __future__ import annotations

import torch
from torch import Tensor

from minidist import comm
from minidist.parallel.sharding.whole.whole_parameters import WholeParameters


class LoopMeans:
    """Turns sums over the ranks into means: over equal shares, rows, or weights of the losses."""

    def __init__(self, shared: WholeParameters) -> None:
        self._shared = shared
        self._weight: float | Tensor | None = None  # of the losses since the last `average`

    def weighted(self, loss: Tensor, weight: float | Tensor) -> Tensor:
        """A mean loss times its weight, for `backward`: gradients become those of the weighted mean.

        Use it for all micro-batches of all ranks; a rank without any calls `synchronize(rows=0)`. weight:
        over how much the loss is a mean, such as rows, or tokens that are not ignored.
        """
        self._weight = weight if self._weight is None else self._weight + weight
        return loss * weight

    def average(self, rows: float | None = None) -> None:
        """Average the gradients over the ranks: call it after backward and before the optimizer's step.

        A sum of weights costs one more message of 8 bytes, and a pass over the gradients. rows: None if the
        losses were means over equal shares, or came from `weighted`. If a loss is the sum over this rank's
        rows, give their number on every rank, even if it is 0, and with micro-batches that of all.

        Raises ValueError if there are no rows on any rank, or the ranks' parameters differ.
        """
        self._shared.sum_over_ranks()
        weight, self._weight = self._weight if rows is None else rows, None
        if weight is None:
            return
        rows, over = float(weight), self._shared.sets[0].gradient_comm
        device = next((tensor.device for tensor in self._shared.resident()), None)
        count = torch.tensor(rows, dtype=torch.float64, device=device)
        total = float(comm.all_reduce(count, group=over.group))
        if rows < 0 or not total:
            raise ValueError(
                f"rows is {rows:g}, and over all ranks {total:g}; give each rank's number of rows"
            )
        # What compression has kept back belongs to sums over rows, as the next step's gradients will.
        self._shared.rescale(over.ranks / total, kept=False)
