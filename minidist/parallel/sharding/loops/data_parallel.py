"""Data parallelism for a loop of one's own: each rank computes on its rows, and gradients are averaged.

Each option is one idea more: `bucket_mb=0, overlap=False` sends a message for each parameter after backward;
`overlap=False` sends flat buckets; the default sends a bucket while backward computes the others. Ranks may
have different numbers of rows: `weighted` and `synchronize` make means of the sums.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import Group
from minidist.parallel.compression.by_name import compression_of
from minidist.parallel.compression.compressor import Compression
from minidist.parallel.contract.residency import DATA_PARALLEL
from minidist.parallel.flat.gradients import GradientComm
from minidist.parallel.guards.claims import BY_ZERO
from minidist.parallel.guards.refusals import refuse_meta
from minidist.parallel.sharding.loops.loop_classes import check_bucket_mb, check_module, delegated
from minidist.parallel.sharding.sets.equal_start import start_equal
from minidist.parallel.sharding.sets.parameter_set import ParameterSet
from minidist.parallel.sharding.whole.whole_parameters import WholeParameters


class DataParallel(nn.Module):
    """A module whose copies on all ranks stay the same, for a loop that the user writes.

    >>> model = md.DataParallel(model)
    >>> optimizer.zero_grad()
    >>> loss = cross_entropy(model(inputs), targets)
    >>> loss.backward()
    >>> model.synchronize()
    >>> optimizer.step()

    Rank 0's parameters and buffers are sent to all at the start. After `synchronize` each gradient is the
    mean over the ranks, as in torch's DDP: that of the mean loss over the global batch, if the shares are
    equal; otherwise weight the losses (`weighted`). Call it on all ranks, once for each optimizer step.
    Gradients are views into the buckets. Parameters may be tied, frozen, unused, of several dtypes, or have
    sparse gradients, which are sent as rows. `requires_grad` may change between steps, on all ranks alike.

    Args:
        module: the model; the same architecture on all ranks.
        group: the ranks that share the batch; None for all. A group of one sends and compresses nothing.
        bucket_mb: largest size of a bucket in MB (2^20 bytes); 0 for one all-reduce a parameter.
        overlap: reduce while backward still runs; False waits for `synchronize`.
        compression: "float16", "bfloat16", "topk", "powersgd", an object such as `PowerSGD(rank=2)`, or None:
            fewer bytes, with an error.
        algorithm: how the collectives work; see `comm.all_reduce`.
        broadcast_buffers: send rank 0's buffers, such as BatchNorm's statistics, to all ranks before each
            forward pass in training. Otherwise each rank keeps its own.

    Raises TypeError or ValueError if an argument is wrong, the ranks' modules differ, another object trains
    the module, or an embedding has max_norm.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group = None,
        bucket_mb: float = 25,
        overlap: bool = True,
        compression: str | Compression | None = None,
        algorithm: str = "auto",
        broadcast_buffers: bool = False,
    ) -> None:
        super().__init__()
        check_bucket_mb(bucket_mb)
        over = GradientComm(group, algorithm)
        check_module(module, shared_with=[BY_ZERO], is_alone=over.ranks == 1)
        self.module, self.group, self.compression = module, group, compression_of(compression)
        param_set = ParameterSet(DATA_PARALLEL, over, compression=self.compression)
        refuse_meta("module", [*module.named_parameters(), *module.named_buffers()])
        start_equal(module, [param_set])
        self.shared = WholeParameters(
            module.named_parameters,
            [param_set],
            module=module,
            bucket_mb=bucket_mb,
            overlap=overlap,
            broadcast_buffers=broadcast_buffers,
        )
        self._weight: float | Tensor | None = None  # of the losses since the last `synchronize`

    forward = delegated("shared", WholeParameters.forward)
    ready = delegated("shared", WholeParameters.ready)
    no_sync = delegated("shared", WholeParameters.no_sync)
    bytes_per_step = delegated("shared", WholeParameters.bytes_per_step)

    def weighted(self, loss: Tensor, weight: float | Tensor) -> Tensor:
        """A mean loss times its weight, for `backward`: gradients become those of the weighted mean.

        Use it for all micro-batches of all ranks; a rank without any calls `synchronize(rows=0)`. weight:
        over how much the loss is a mean, such as rows, or tokens that are not ignored.
        """
        self._weight = weight if self._weight is None else self._weight + weight
        return loss * weight

    def synchronize(self, rows: float | None = None) -> None:
        """Average the gradients over the ranks: call it after backward and before the optimizer's step.

        A sum of weights costs one more message of 8 bytes, and a pass over the gradients. rows: None if the
        losses were means over equal shares, or came from `weighted`. If a loss is the sum over this rank's
        rows, give their number on every rank, even if it is 0, and with micro-batches that of all.

        Raises ValueError if there are no rows on any rank, or the ranks' parameters differ.
        """
        self.shared.sum_over_ranks()
        weight, self._weight = self._weight if rows is None else rows, None
        if weight is None:
            return
        rows, over = float(weight), self.shared.sets[0].gradient_comm
        device = next((tensor.device for tensor in self.shared.resident()), None)
        count = torch.tensor(rows, dtype=torch.float64, device=device)
        total = float(comm.all_reduce(count, group=over.group))
        if rows < 0 or not total:
            raise ValueError(
                f"rows is {rows:g}, and over all ranks {total:g}; give each rank's number of rows"
            )
        # Compression keeps back parts of sums over rows, and the next step's gradients are such sums again.
        self.shared.rescale(over.ranks / total, kept=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a DataParallel cannot be copied or pickled; save its state_dict(), or its .module")
