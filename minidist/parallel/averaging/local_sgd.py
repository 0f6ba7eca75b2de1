"""Local SGD: every rank trains by itself, and every k steps the ranks average their parameters.

Data parallelism sends a gradient in each step. Here a rank sends its parameters in every k-th step, so k
times fewer bytes. In between, the copies drift apart, which costs accuracy if k is large. With k = 1, equal
shares and plain SGD it equals data parallelism: the mean of x - lr g over the ranks is x - lr (mean of g).
The same holds for momentum, which is linear in the gradients, but not for Adam.

Sources: Stich 2019, "Local SGD Converges Fast and Communicates Little", algorithm 1; Lin et al. 2020, "Don't
Use Large Mini-Batches, Use Local SGD", section 4, for averaging in every step at first (post-local SGD).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minidist import comm
from minidist._arguments import check_whole
from minidist.comm.work import Group
from minidist.parallel.flat.buckets import Bucket, GradientComm
from minidist.parallel.flat.joined_messages import MB, broadcast_together, deal_to_buckets, require_same


class LocalSGD(nn.Module):
    """A module whose copies on all ranks are averaged every few steps, for a loop that the user writes.

    >>> model = md.LocalSGD(model, every=8)
    >>> optimizer.zero_grad()
    >>> cross_entropy(model(inputs), targets).backward()
    >>> optimizer.step()
    >>> model.synchronize()

    The constructor broadcasts parameters and buffers from the group's rank 0. Averaging covers the parameters
    that get gradients; the optimizer's state and the buffers stay each rank's own. Memory: one more copy of
    the parameters, in which they are averaged. Raises TypeError or ValueError if an argument is wrong, or the
    ranks' modules differ.

    every: k, the steps between two averagings. warmup: how many steps at the start each end with an
    averaging. bucket_mb: most megabytes in one message. algorithm: see `comm.all_reduce`.
    """

    def __init__(
        self,
        module: nn.Module,
        every: int = 8,
        group: Group = None,
        warmup: int = 0,
        bucket_mb: float = 25,
        algorithm: str = "auto",
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}; give a torch.nn.Module")
        check_whole("every", every, 1, ", the steps between two averagings")
        check_whole("warmup", warmup, 0, ", the steps at the start that each end with an averaging")
        self.module, self.every, self.warmup = module, every, warmup
        self.steps = 0  # optimizer steps so far
        self._gradient_comm, self._limit = GradientComm(group, algorithm), int(bucket_mb * MB)
        self._averaged: list[nn.Parameter] = []
        self._buckets: list[Bucket] = []
        state = [*module.named_parameters(), *module.named_buffers()]
        if self._gradient_comm.ranks > 1:
            require_same("parameters and buffers", state, group)
        broadcast_together([tensor for _, tensor in state], group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs for this rank's share of the batch."""
        return self.module(*args, **kwargs)

    def synchronize(self) -> bool:
        """After the optimizer's step: count it, average the parameters if it is time, and return whether."""
        self.steps += 1
        due = self.steps <= self.warmup or (self.steps - self.warmup) % self.every == 0
        if due:
            self.average()
        return due

    @torch.no_grad()
    def average(self) -> None:
        """Average the parameters now, as at the end of training. Sends 2 (n - 1) / n of their bytes."""
        gradient_comm = self._gradient_comm
        if gradient_comm.ranks == 1:
            return
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if list(map(id, parameters)) != list(map(id, self._averaged)):
            self._averaged = parameters
            self._buckets = []
            for indices in deal_to_buckets(parameters, range(len(parameters)), self._limit):
                numel = sum(parameters[index].numel() for index in indices)
                first = parameters[indices[0]]
                flat = gradient_comm.zeros(numel, first.dtype, first.device)
                self._buckets.append(Bucket(indices, parameters))
                self._buckets[-1].hold(flat)

        works = []
        for bucket in self._buckets:
            torch._foreach_copy_(bucket.views, [parameters[index] for index in bucket.param_indices])
            works.append(
                comm.all_reduce(
                    bucket.gradients, "mean", gradient_comm.algorithm, gradient_comm.group, async_op=True
                )
            )
        for bucket, work in zip(self._buckets, works, strict=True):
            work.wait()
            torch._foreach_copy_([parameters[index] for index in bucket.param_indices], bucket.views)
