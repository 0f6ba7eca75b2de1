"""`LossCheck`: in the first step, is the loss the mean that it says it is?

A sum, or a mean over tokens of which some are ignored, would train another model, without an error. So the
first step compares the loss of some rows with that of their halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.errors import CollectiveError
from minidist.parallel.contract.batch import rows_of, split, tensors
from minidist.parallel.engine.rank_model import Weight


class LossCheck:
    """Compares, in an engine's first step, the loss of some rows with the weighted mean of its halves."""

    def __init__(self) -> None:
        self.found = (math.nan, math.nan)  # this rank's loss, and the mean of its halves, if they differ
        self.weighted = False  # whether the loss has returned a weight

    @torch.no_grad()
    def compare(
        self, of: Callable[[Any], tuple[Tensor, Weight]], given: Any, dtype: torch.dtype | None = None
    ) -> None:
        """Compare `of(given)` with that of both halves of the rows.

        Rows of which the result depends on random numbers, or of which there is only one, show nothing; `of`
        is then still called three times, as it may be a collective. dtype: in which it computes, if that is
        not the loss's.
        """
        count = rows_of(given)
        parts = split(given, 2) if count > 1 else (given, given)
        on_gpu = [x.device for _, x in tensors(given) if x.is_cuda][:1]
        with torch.random.fork_rng(devices=on_gpu):
            before = _random_state(on_gpu)
            whole, _ = of(given)
            try:
                halves = [of(part) for part in parts]
            except CollectiveError:  # another rank's
                raise
            except RuntimeError as error:
                raise RuntimeError(
                    f"the loss of all rows could be computed, and that of half of them not: {error}. The "
                    "first step compares them. If model or loss keep state from one call to the next that is "
                    "no buffer or attribute of theirs, or the batch has a part that is not cut by rows, give "
                    "prepare check_loss=False"
                ) from error
            if count < 2 or not torch.equal(before, _random_state(on_gpu)):
                return
        weights = [float(weight) for _, weight in halves]
        if not all(weights):
            return  # a mean over nothing
        mean = sum(float(loss) * weight for (loss, _), weight in zip(halves, weights, strict=True))
        mean /= sum(weights)
        size = sum(abs(float(loss)) for loss, _ in halves) + abs(float(whole))
        # As of a plan: up to half the digits. NaN is no reason; the step will show it.
        if abs(float(whole) - mean) > math.sqrt(torch.finfo(dtype or whole.dtype).eps) * size:
            self.found = float(whole), mean

    def agree(self) -> None:
        """Raise ValueError on all ranks if any has found a difference. Each sends 24 (n - 1) bytes."""
        own = torch.tensor([[*self.found, float(self.weighted)]], dtype=torch.float64, device=comm.device())
        for rank, each in enumerate(comm.all_gather(own)):
            loss, halves, has_weight = (float(x) for x in each)
            self.weighted |= bool(has_weight)
            if loss != halves and not math.isnan(loss):
                raise ValueError(
                    f"the loss is not the mean that it should be: of some rows of rank {rank} it is "
                    f"{loss:.6g}, and the mean of its two halves, by their weights, is {halves:.6g}. Let it "
                    "return the mean over rows, or (mean, weight) with the number that it is a mean over, "
                    "such as that of the tokens that are not ignored. A loss that compares rows, such as a "
                    "contrastive one, has to gather them first: see check_loss of md.prepare. If you know "
                    "that ranks may average it all the same, give prepare check_loss=False"
                )


def _random_state(devices: list[torch.device]) -> Tensor:
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return torch.cat(states)
