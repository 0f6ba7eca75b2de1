"""Data parallelism: every rank holds the whole model and computes on its share of the batch.

The ranks start from one set of weights; after each backward pass the gradients are averaged over the ranks;
then each rank makes the same optimizer step. `DataParallel`'s options are the steps from the naive form to
the fast one, each with one idea more:

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

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn

from minidist import comm
from minidist.comm.work import Group
from minidist.parallel.compression.by_name import compression_of
from minidist.parallel.compression.compressor import Compression
from minidist.parallel.flat.buckets import MB, GradientComm, broadcast_together, cut, require_same
from minidist.parallel.guards.ownership import DATA_PARALLEL, ZERO, claim, require_free
from minidist.parallel.guards.refusals import refuse_meta, refuse_renormed
from minidist.parallel.sharding.bucket_assignment import BucketAssignment, round_bytes
from minidist.parallel.sharding.reducer import Reducer


class DataParallel(nn.Module):
    """A module whose copies on all ranks stay the same, for a loop that the user writes.

    >>> model = md.DataParallel(model)
    >>> optimizer.zero_grad()
    >>> loss = cross_entropy(model(inputs), targets)
    >>> loss.backward()
    >>> model.synchronize()
    >>> optimizer.step()

    After `synchronize` each gradient is the mean over the ranks of what `backward` computed on each: that of
    the mean loss over the global batch where the shares are equal, as in torch's DDP. `synchronize(rows=...)`
    is for shares that differ. With `overlap` the gradients are averaged already when `backward` returns, and
    `synchronize` does what is left: it lets a rank take part that had no backward pass, or only such inside
    `no_sync`. Call it once for each optimizer step, on all ranks. Gradients are views into the buckets, so
    they take their memory once.

    Parameters and buffers are broadcast from the group's rank 0 when it is made, so that ranks which start
    from different seeds do not go on differing; see `comm.broadcast` for the bytes. What a step sends:
    `bytes_per_step`. In a group of one nothing is sent, nor compressed.

    Parameters may be tied, frozen, of several dtypes, unused on some ranks or all; `requires_grad` may
    change between steps, the same way on all ranks. Sparse gradients, as of `nn.Embedding(sparse=True)`, are
    gathered as rows (compression/sparse_gradients.py).

    Args:
        module: the model; the same architecture on all ranks.
        group: the ranks that share the batch; None for all.
        bucket_mb: size of a bucket in MB (2^20 bytes), at most; 0 for one all-reduce a parameter.
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
        if isinstance(bucket_mb, bool) or not (isinstance(bucket_mb, int | float) and 0 <= bucket_mb < inf):
            raise ValueError(f"bucket_mb is {bucket_mb!r}; give megabytes, or 0 for one message a parameter")
        require_free(module.named_parameters(), shared_with=[ZERO])
        refuse_meta("module", [*module.named_parameters(), *module.named_buffers()])
        self.module = module
        self.group, self.bucket_mb, self.overlap = group, bucket_mb, overlap
        self.compression = compression_of(compression)
        self.algorithm, self.broadcast_buffers = algorithm, broadcast_buffers
        self.reducer: Reducer[BucketAssignment] | None = None  # None in a group of one
        if self._exchange.ranks > 1:
            refuse_renormed(module)
        state = [*module.named_parameters(), *module.named_buffers()]
        if self._exchange.ranks > 1:
            require_same("parameters and buffers", state, group)
            broadcast_together([tensor for _, tensor in state], group)
        self._attach()

    @property
    def _exchange(self) -> GradientComm:
        return GradientComm(self.group, self.algorithm)

    def _attach(self) -> None:
        """Put the hooks on the parameters that get gradients now."""
        self._parts = [*self.module.modules()]
        self._parameters_seen = set(map(id, self.module.parameters()))
        self._trained = self._trained_now()
        claim(self, DATA_PARALLEL, trainable(self.module))
        syncing = self.reducer is None or self.reducer.syncing
        self.reducer = None
        if self._exchange.ranks > 1:
            named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
            bucket_bytes = int(self.bucket_mb * MB)
            make_plan = partial(
                BucketAssignment,
                named,
                exchange=self._exchange,
                bucket_bytes=bucket_bytes,
                compression=self.compression,
            )
            self.reducer = Reducer(named, self._exchange, self.overlap, make_plan)
            self.reducer.syncing = syncing

    def _trained_now(self) -> list[Any]:
        """What changes where a module or parameter is added, thawed, or converted to another dtype."""
        # By hand: self.module.parameters() takes 0.1 ms for a small transformer, and every step looks here.
        parameters = [p for part in self._parts for p in part._parameters.values() if p is not None]
        children = [id(child) for part in self._parts for child in part._modules.values()]
        return [(id(p), p.dtype, p.device) for p in parameters if p.requires_grad] + children

    def _follow_changes(self) -> None:
        """New hooks and buckets where other parameters get gradients than before."""
        for name, parameter in self.module.named_parameters():
            if id(parameter) not in self._parameters_seen:
                raise ValueError(
                    f"the parameter {name} was added after the DataParallel was made, which would not "
                    "synchronize it; del it, and make a new DataParallel of the module"
                )
        assert self.reducer is not None
        self.reducer.detach()
        self._attach()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for this rank's share of the batch."""
        self.ready()
        return self.module(*args, **kwargs)

    def ready(self) -> None:
        """What `forward` does first: for loops that call parts of the module themselves."""
        if self.reducer is not None and torch.is_grad_enabled():
            self.reducer.recover()
            if self._trained_now() != self._trained:
                self._follow_changes()
            if self.broadcast_buffers and self.training and self.reducer.syncing:
                broadcast_together([*self.module.buffers()], self.group)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, `backward` adds up gradients on this rank and sends nothing.

        For all micro-batches but the last: its `backward` outside, or `synchronize`, then sends the sum.
        """
        before = self._set_syncing(False)
        try:
            yield
        finally:
            self._set_syncing(before)

    def _set_syncing(self, value: bool) -> bool:
        if self.reducer is None:
            return value
        before, self.reducer.syncing = self.reducer.syncing, value
        return before

    def synchronize(self, rows: int | None = None) -> None:
        """Average the gradients over the ranks: call it after backward and before the optimizer's step.

        Args:
            rows: None where the loss was a mean over rows, and shares are equal. Where they are not, let
                the loss be the sum over this rank's rows and give their number, 0 too, on every rank: the
                gradients become those of the mean over all ranks' rows. With micro-batches, give the rows of
                all of them. It costs one more message of 8 bytes, and a pass over the gradients.

        Raises:
            ValueError: there are no rows on any rank, or the ranks' parameters differ.
            CollectiveError: a peer is gone or late.
        """
        if self.reducer is not None:
            self.reducer.synchronize()
        if rows is None:
            return
        device = device_of(self.module)
        total = float(
            comm.all_reduce(torch.tensor(rows, dtype=torch.float64, device=device), group=self.group)
        )
        if rows < 0 or not total:
            raise ValueError(f"rows is {rows}, and over all ranks {total:g}; give each rank's number of rows")
        # What compression has kept back is of sums over rows, as the next step's gradients will be.
        self.rescale_gradients(self._exchange.ranks / total, kept=False)

    def rescale_gradients(self, factor: float, kept: bool = True) -> None:
        """Multiply all gradients; with `kept` also what compression has kept back of them."""
        if self.reducer is not None and self.reducer.plan is not None:
            self.reducer.plan.rescale(factor, kept)
            return
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def bytes_per_step(self) -> int:
        """Bytes that this rank sends in a step, by the formulas, once a first step has settled the buckets.

        An all-reduce sends 2 (n - 1) / n of its bytes: of each bucket, compressed or not, and of P + 2
        counts for P parameters that get gradients, in the last bucket's dtype where that is not compressed
        and is float32 or float64, else in float64. Sparse gradients, rows and buffers come on top.
        """
        if self.reducer is None:
            return 0
        if self.reducer.plan is None:
            raise RuntimeError("the buckets follow from the first backward pass; train a step first")
        return self.reducer.plan.bytes_sent()

    # Hooks, buckets and groups belong to this process and this object; what is copied or saved is the rest.

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            raise TypeError(
                "a DataParallel over a group cannot be pickled, since the group cannot; save its "
                "state_dict() or its .module"
            )
        return {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.reducer = None
        self._attach()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        shared = {*_OF_THIS_PROCESS, "group"}
        state = {name: deepcopy(v, memo) for name, v in self.__dict__.items() if name not in shared}
        copy.__setstate__({**state, "group": self.group})
        return copy


_OF_THIS_PROCESS = ("reducer", "_parts", "_parameters_seen", "_trained")


def bytes_per_step(
    model: nn.Module, ranks: int, bucket_mb: float = 25, compression: str | Compression | None = None
) -> int:
    """Bytes that a rank sends in a step, predicted without a step; see `DataParallel.bytes_per_step`.

    It takes gradients to come in the reverse of the order in which parameters are registered. Where they do
    not, other gradients share a bucket, and each bucket's division may round differently.
    """
    parameters = trainable(model)
    parts = cut(parameters, reversed(range(len(parameters))), int(bucket_mb * MB))
    return round_bytes(parameters, parts, compression_of(compression), ranks)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that get gradients, each once, also where two layers share one."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are; the CPU where it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
