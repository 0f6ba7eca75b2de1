"""Data parallelism: every rank holds the whole model and computes on its share of the batch.

The ranks start from the same weights. After each backward pass the gradients are averaged over the ranks, and
each rank makes the same optimizer step. The options of `DataParallel` lead from the naive form to the fast
one, each with one idea more:

| Options | What is sent |
|---|---|
| `bucket_mb=0, overlap=False` | after backward, one all-reduce a parameter: each pays a message's latency |
| `overlap=False` | after backward, flat buckets of many gradients: few messages |
| (none) | each bucket as soon as its gradients are there, while backward computes the others |
| `with model.no_sync()` | nothing: gradients add up on the rank, and the last micro-batch sends their sum |
| `compression="powersgd"` | fewer bytes, with an error: see compression/by_name.py |

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import Group
from minidist.parallel.compression.by_name import compression_of
from minidist.parallel.compression.compressor import Compression
from minidist.parallel.flat.gradient_comm import GradientComm
from minidist.parallel.flat.joined_messages import give_memory
from minidist.parallel.guards.ownership import ZERO, require_free
from minidist.parallel.guards.refusals import refuse_meta, refuse_renormed
from minidist.parallel.sharding.loop_arguments import check_bucket_mb
from minidist.parallel.sharding.parameter_set import ParameterSet
from minidist.parallel.sharding.residency import DATA_PARALLEL
from minidist.parallel.sharding.whole_parameters import WholeParameters, start_equal


class DataParallel(nn.Module):
    """A module whose copies on all ranks stay the same, for a loop that the user writes.

    >>> model = md.DataParallel(model)
    >>> optimizer.zero_grad()
    >>> loss = cross_entropy(model(inputs), targets)
    >>> loss.backward()
    >>> model.synchronize()
    >>> optimizer.step()

    After `synchronize` each gradient is the mean over the ranks, as in torch's DDP: that of the mean loss
    over the global batch, if the shares are equal. If they differ, weight the losses: `weighted`. Call it on
    all ranks, once for each optimizer step: with `overlap` the gradients are averaged when `backward`
    returns, but a rank may have had no backward pass, or only some inside `no_sync`. Gradients are views into
    the buckets, so they take their memory once.

    At the start the group's rank 0 broadcasts parameters and buffers, so that ranks with different seeds
    agree; see `comm.broadcast` for the bytes, and `bytes_per_step` for those of a step. A group of one sends
    and compresses nothing.

    Parameters may be tied, frozen, of several dtypes, or unused on some or all ranks. `requires_grad` may
    change between steps, in the same way on all ranks. Sparse gradients, as of `nn.Embedding(sparse=True)`,
    are gathered as rows (compression/sparse_gradients.py).

    Args:
        module: the model; the same architecture on all ranks.
        group: the ranks that share the batch; None for all.
        bucket_mb: largest size of a bucket in MB (2^20 bytes); 0 for one all-reduce a parameter.
        overlap: reduce while backward still runs; False waits for `synchronize`.
        compression: "float16", "bfloat16", "topk", "powersgd", an object such as `PowerSGD(rank=2)`, or None.
        algorithm: how the collectives work; see `comm.all_reduce`.
        broadcast_buffers: also send rank 0's buffers, such as BatchNorm's statistics, to all ranks before
            each forward pass in training. Otherwise each rank keeps its own.

    Raises:
        TypeError, ValueError: an argument is wrong, or the ranks' modules differ, or another object trains
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
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}; give a torch.nn.Module")
        check_bucket_mb(bucket_mb)
        require_free(module.named_parameters(), shared_with=[ZERO])
        refuse_meta("module", [*module.named_parameters(), *module.named_buffers()])
        give_memory(module)
        self.module, self.group = module, group
        self.compression = compression_of(compression)
        self._weight: float | Tensor | None = None  # of the losses since the last `synchronize`
        over = GradientComm(group, algorithm)
        sets = [ParameterSet(DATA_PARALLEL, over)]
        if over.ranks > 1:
            refuse_renormed(module)
            start_equal(module, sets)
        self.shared = WholeParameters(
            module.named_parameters,
            sets,
            module=module,
            bucket_mb=bucket_mb,
            overlap=overlap,
            compression=self.compression,
            broadcast_buffers=broadcast_buffers,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs for this rank's share of the batch."""
        return self.shared.forward(*args, **kwargs)

    def ready(self) -> None:
        """Prepare a pass as `forward` does, for loops that call parts of the module themselves."""
        self.shared.ready()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, `backward` adds up gradients on this rank and sends nothing.

        Use it for all micro-batches but the last; its `backward`, or `synchronize`, then sends the sum.
        """
        return self.shared.no_sync()

    def weighted(self, loss: Tensor, weight: float | Tensor) -> Tensor:
        """A mean loss times its weight, for `backward`: gradients become those of the weighted mean.

        >>> model.weighted(cross_entropy(model(inputs), targets), len(inputs)).backward()
        >>> model.synchronize()

        Use it for all micro-batches of all ranks. A rank without any calls `synchronize(rows=0)`.

        loss: a mean. weight: over how much, such as rows, or tokens that are not ignored.
        """
        self._weight = weight if self._weight is None else self._weight + weight
        return loss * weight

    def synchronize(self, rows: float | None = None) -> None:
        """Average the gradients over the ranks: call it after backward and before the optimizer's step.

        A sum of weights costs one more message of 8 bytes, and a pass over the gradients.

        Args:
            rows: None if the losses were means over equal shares, or came from `weighted`. If a loss is the
                sum over this rank's rows, give their number on every rank, even if it is 0, and with
                micro-batches that of all: the gradients become those of the mean over all ranks' rows.

        Raises:
            ValueError: there are no rows on any rank, or the ranks' parameters differ.
        """
        self.shared.sum_over_ranks()
        weight, self._weight = self._weight if rows is None else rows, None
        if weight is None:
            return
        device = next((parameter.device for parameter in self.module.parameters()), None)
        own = float(weight)
        sums = torch.tensor(own, dtype=torch.float64, device=device)
        total = float(comm.all_reduce(sums, group=self.group))
        if own < 0 or not total:
            raise ValueError(
                f"rows is {own:g}, and over all ranks {total:g}; give each rank's number of rows"
            )
        # What compression has kept back belongs to sums over rows, as the next step's gradients will.
        self.shared.rescale(self.shared.sets[0].gradient_comm.ranks / total, kept=False)

    def bytes_per_step(self) -> int:
        """Bytes that this rank sends in a step, by the formulas, once a first step has settled the buckets.

        An all-reduce sends 2 (n - 1) / n of its bytes. There is one of each bucket, compressed or not, and of
        P + 2 counts for P parameters that get gradients: in the last bucket's dtype if that bucket is not
        compressed and is float32 or float64, else in float64. Sparse gradients, rows and buffers come on top.
        """
        return self.shared.bytes_per_step()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a DataParallel cannot be copied or pickled; save its state_dict(), or its .module")
