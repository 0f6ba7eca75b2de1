"""A set of parameters: what each rank keeps of them, which ranks sum their gradients, and who owns a share.

A model has one such set, or several: experts' gradients, say, are summed over fewer ranks than the rest. A
set's gradients are summed in rounds: they come to its buckets, each bucket is reduced, and
`GradientsInLentMemory.give_back` (flat/gradients.py) lets go of what the set's row does not keep
(contract/residency.py). Two events complete a bucket: its last gradient has arrived (reducer.py), or, where
parameters are not whole, the backward pass has left a unit (unit_runtime.py).

| What a rank keeps | Where gradients lie | A bucket's reduction |
|---|---|---|
| gradients and state whole | in buckets; `grad` is a view | all-reduce, or its compressed form |
| gradients whole, state 1/n | in buckets; the sums replace this rank's share | reduce-scatter |
| gradients 1/n | whole only until `give_back`; the share of the sums stays | reduce-scatter |

A `ZeroOptimizer` of stage 1 leaves `grad` to the loop around it, so its buckets only carry copies.

Sources: Li et al. 2020, "PyTorch Distributed" (see data_parallel.py), section 3.2; Rajbhandari et al. 2020,
"ZeRO" (see zero.py), sections 5.2 (buckets) and 7.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidist.comm.algorithms.formulas import all_reduce_bytes
from minidist.comm.work import rank_in
from minidist.parallel.compression.compressor import Compression, Reduction
from minidist.parallel.contract.residency import Residency
from minidist.parallel.flat.bucket_layout import BucketLayout, Deal, WholeTensors, evenly, whole_shape
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.flat.gradients import (
    GradientComm,
    GradientMemory,
    Gradients,
    GradientsInLentMemory,
    GradientsToAll,
    GradientsToOwners,
    Messages,
)
from minidist.parallel.flat.joined_messages import deal_to_buckets, deal_whole
from minidist.parallel.flat.values import WholeValues
from minidist.parallel.sharding.optimizer.memory_source import MemorySource
from minidist.parallel.training.elementwise_optimizers import UpdateWork

TRANSIENT = 2
"""Buckets that have memory at a time where it is lent: one is filled while the one before it is sent."""
TAIL_DTYPES = (torch.float32, torch.float64)
"""Dtypes of gradients among which counts of ranks, rows and a loss can be sent."""


class Totals(NamedTuple):
    """Numbers of a rank that a round sums over the ranks along with its gradients; or their sums."""

    weight: float | Tensor = 0.0
    loss: float | Tensor = 0.0  # a sum, each loss times its weight
    last_passes: float = 0.0  # 1.0 in the last pass of this rank's step: where each pass is a round


class ParameterSet:
    """Parameters that the same ranks share in the same way, and the rounds of their gradients.

    A new set is empty. Its parameters' indices are added to `indices`, `deal` puts the parameters into
    buckets, and `make_room` makes memory for their gradients, after which rounds can run.

    Args:
        residency: what every rank keeps whole.
        gradient_comm: its `group` sums the gradients, and its `share_group` are the owners of a share each.
        names: of the parameters; None for all that are in no other set.
        average: gradients become means over the ranks, and not sums.
        compression: of reductions to all ranks.
        leaves_grad: `grad` stays as the backward pass left it.
        memory, sum_dtype: where the shares of the sums lie, and in which dtype; None for the gradients' own.

    Attributes:
        indices: of its parameters, among all of the model.
        buckets: of parameters that get gradients, in the order in which they are sent. gradients: of each
            bucket, from `make_room` on.
        op: "mean" or "sum" over the ranks, of reductions to owners. scale: the factor of this rank's
            gradients before they are summed.
        stay_in_buckets: whether gradients stay there between backward passes.
        pass_has_rows: False in a pass of padding, which uses no parameters.
        total_count: how many of `Totals` are summed along with a round.
        unused: indices of the parameters without a gradient on this rank, in the round that runs.
        users: on how many ranks each parameter had a gradient, over all rounds since `begin`.
        totals: weight and loss, added up since `begin`.
        tail, tail_in_bucket: for each parameter the number of ranks that used it, then the totals; whether
            this is the end of the last bucket, or a message of its own.
        sparse: parameters in no bucket, whose gradients come as rows.
    """

    def __init__(
        self,
        residency: Residency,
        gradient_comm: GradientComm,
        names: Collection[str] | None = None,
        *,
        average: bool = True,
        compression: Compression | None = None,
        leaves_grad: bool = False,
        memory: MemorySource | None = None,
        sum_dtype: torch.dtype | None = None,
    ) -> None:
        self.residency, self.gradient_comm, self.names = residency, gradient_comm, names
        self.memory, self.sum_dtype = memory or MemorySource(), sum_dtype
        is_sent = names is None or gradient_comm.ranks > 1  # experts may be on one rank alone
        self.leaves_grad, self.compression = leaves_grad, compression if is_sent else None
        self.op, self.scale, self.pass_has_rows = "sum", 1.0, True
        if average and residency.whole_state:
            self.scale = 1 / gradient_comm.ranks
        elif average:  # a reduction to owners takes the mean itself
            self.op = "mean"
        whole = residency.whole_parameters
        self.stay_in_buckets = whole and residency.whole_gradients and not leaves_grad
        self.total_count = 2  # all but `last_passes`, which `WholeParameters.synchronize` may use
        if whole and not residency.whole_state:
            self.total_count = 3
        self.whole_tensors: WholeTensors | None = None  # deals parameters that no share may cut
        self.users = torch.zeros(0, dtype=torch.float64)
        self.totals = torch.zeros(2, dtype=torch.float64)
        self.empty()

    def empty(self) -> None:
        """Have no parameters and no buckets."""
        self.indices: list[int] = []
        self._number_of: dict[int, int] = {}  # of each of `indices`, in the tail
        self.unused: list[int] = []
        self.buckets: list[Bucket[Any]] = []
        self.gradients: list[Gradients] = []
        self.reductions: list[Reduction] = []  # of compression, for each bucket
        self.sparse: list[nn.Parameter] = []
        self.tail = torch.zeros(0, dtype=torch.float64)
        self.tail_in_bucket = False
        self._lies_in: dict[int, tuple[Gradients, int]] = {}

    @property
    def counts_here(self) -> bool:
        """Whether this rank's part counts in a sum over all ranks in which each element counts once."""
        owners = 1 if self.residency.whole_state else self.gradient_comm.owners
        return rank_in(self.gradient_comm.group) < owners

    # Buckets, and memory for gradients.

    def deal(
        self,
        parameters: Sequence[nn.Parameter],
        order: Sequence[int],
        limit: int,
        work: UpdateWork | None,
        name_of: Callable[[int], str],
    ) -> list[Bucket[Any]]:
        """Make buckets of up to `limit` bytes for the parameters at the indices in `order`. A collective.

        Where the state is shared, a bucket also holds the parameters' values, cut into a share for each rank.
        work: of the update of a whole parameter; None where shares may end inside one.
        """
        over = None if self.residency.whole_state else self.gradient_comm
        deal: Deal = evenly
        if over is not None and work is not None and order:
            deal = self.whole_tensors = self.whole_tensors or WholeTensors(work, over.owners)
            sized = [p.new_empty(()).expand(whole_shape(p)) for p in parameters]
            parts = deal_whole(sized, order, limit, deal)
        else:
            parts = deal_to_buckets(parameters, order, limit)
        new: list[Bucket[Any]] = []
        for part in parts:
            own, values = [parameters[index] for index in part], None
            layout = BucketLayout(part, parameters) if over is None else over.layout(part, parameters, deal)
            if over is not None:
                values = WholeValues(layout, own, over, [*map(name_of, part)])
            new.append(Bucket(layout, own, own[0].device, values))
        self.buckets += new
        return new

    def make_room(self, parameters: Sequence[nn.Parameter], sparse: Collection[int] = ()) -> None:
        """Make memory for a round of the parameters and buckets that there are now. A collective.

        What the rounds before have summed stays. sparse: indices of parameters in no bucket.
        """
        device = parameters[0].device if parameters else torch.device("cpu")
        self.sparse = [parameters[index] for index in self.indices if index in sparse]
        self._number_of = {index: number for number, index in enumerate(self.indices)}
        tail_length = len(self.indices) + self.total_count
        self.tail_in_bucket = False
        if self.residency.whole_state:
            self._send_to_all(tail_length)
        elif self.stay_in_buckets:
            self._keep_and_send_to_owners()
        else:
            self._lend_and_send_to_owners()
        self.gradients = [bucket.gradients for bucket in self.buckets if bucket.gradients is not None]
        for gradients in self.gradients:
            for at, index in enumerate(gradients.layout.param_indices):
                self._lies_in[index] = gradients, at
        if not self.tail_in_bucket:
            self.tail = self.gradient_comm.zeros(tail_length, torch.float64, device)
        before, self.users = self.users, torch.zeros(len(self.indices), dtype=torch.float64, device=device)
        if not self.residency.whole_state:
            self.users[: len(before)] = before
        self.totals = self.totals.to(device)

    def _send_to_all(self, tail_length: int) -> None:
        """Data parallelism: each bucket has memory of its own, and the last one also carries the tail."""
        over, compression = self.gradient_comm, self.compression
        self.reductions = []
        for number, bucket in enumerate(self.buckets):
            layout, run, length = bucket.layout, None, bucket.layout.length
            if compression is None:
                self.tail_in_bucket = bucket is self.buckets[-1] and layout.dtype in TAIL_DTYPES
                flat = over.zeros(length + self.tail_in_bucket * tail_length, layout.dtype, bucket.device)
                self.tail = flat[length:]
            else:  # the bucket itself is not sent
                flat = torch.zeros(length, dtype=layout.dtype, device=bucket.device)
                self.reductions.append(compression.reduction(flat, layout.views_of(flat), over, number))
                run = self.reductions[-1].run
            bucket.gradients = GradientsToAll(layout, over, flat, run)

    def _keep_and_send_to_owners(self) -> None:
        """ZeRO 1: each bucket has memory of its own."""
        for bucket in self.buckets:
            if bucket.gradients is None:
                layout, over = bucket.layout, self.gradient_comm
                flat = over.zeros(layout.length, layout.dtype, bucket.device)
                bucket.gradients = GradientsToOwners(layout, over, self.op, flat)

    def _lend_and_send_to_owners(self) -> None:
        """ZeRO 2 and 3: of each dtype and device the buckets take turns in memory for two."""
        over, kinds = self.gradient_comm, defaultdict[Any, list[Bucket[Any]]](list)
        for bucket in self.buckets:
            kinds[bucket.layout.dtype, bucket.device].append(bucket)
        for (dtype, device), those in kinds.items():
            longest = max(bucket.layout.length for bucket in those)
            turns = [GradientMemory(over.zeros(longest, dtype, device)) for _ in those[:TRANSIENT]]
            for number, bucket in enumerate(those):
                layout, memory = bucket.layout, turns[number % len(turns)]
                if isinstance(bucket.gradients, GradientsInLentMemory):
                    bucket.gradients.lend(memory)
                    continue
                kept = self.memory.zeros(layout.share, self.sum_dtype or dtype, bucket.values.shard.device)
                bucket.gradients = GradientsInLentMemory(layout, over, self.op, memory, kept)

    # Before a bucket is reduced: its gradients come to it.

    def view(self, param_index: int) -> Tensor | None:
        """Where a parameter's gradient lies when its bucket is sent; None where it is sparse."""
        found = self._lies_in.get(param_index)
        if found is None:
            return None
        gradients, at = found
        if isinstance(gradients, GradientsInLentMemory) and not gradients.holds:
            gradients.borrow()
        return gradients.views[at]

    def place(self, param_index: int, parameter: nn.Parameter, scale: float) -> None:
        """Bring a gradient to its bucket, multiplied by `scale`; a sparse one that is in none stays."""
        view, grad = self.view(param_index), parameter.grad
        if view is None or grad is None:
            return
        if grad.requires_grad:  # of backward(create_graph=True)
            grad = grad.detach()
        if grad.is_sparse:
            grad = grad.to_dense()
        if scale != 1:
            torch.mul(grad, scale, out=view)  # one pass instead of one to copy and one to divide
        elif grad is not view:
            view.copy_(grad)
        if grad is not view and not self.leaves_grad:
            parameter.grad = view if self.stay_in_buckets else None

    # The end of a round: who used what, and the totals.

    def fill_tail(self, totals: Totals) -> None:
        """Note which parameters this rank used, and its totals, as many as are summed."""
        count = len(self.indices)
        self.tail[:count] = 1.0
        for index in self.unused:
            self.tail[self._number_of[index]] = 0.0
        for at, value in enumerate(totals[: self.total_count], count):
            self.tail[at] = value

    def send_tail(self) -> Messages:
        """Launch the sum of the tail over the ranks, where no bucket carries it."""
        return Messages(iter([self.gradient_comm.all_reduce(self.tail, blocking=True)]))

    @property
    def was_last_pass(self) -> bool:
        """Whether the last round was that of the last pass for all ranks."""
        return Totals(*self.tail[len(self.indices) :].tolist()).last_passes == self.gradient_comm.ranks

    def summed(self, parameters: Sequence[nn.Parameter]) -> None:
        """React to a complete round."""
        count, unused, self.unused = len(self.indices), self.unused, []
        if self.residency.whole_state:
            self.totals = self.tail[count:]
            self._drop_unused(unused, parameters)
            return
        if self.residency.whole_gradients:  # the sums of this round are all
            self.begin()
        self.users += self.tail[:count]
        self.totals += self.tail[count : count + 2]

    def _drop_unused(self, unused: Sequence[int], parameters: Sequence[nn.Parameter]) -> None:
        """Set the gradient of parameters that no rank used to None, so that the optimizer skips them."""
        if not unused:
            return
        users = self.tail.tolist()
        for index in unused:
            if not users[self._number_of[index]]:
                parameters[index].grad = None
            elif (view := self.view(index)) is not None:
                parameters[index].grad = view

    def begin(self) -> None:
        """Forget the sums: the next round begins them anew."""
        if not self.residency.whole_state:
            for gradients in self.gradients:
                gradients.begun = False
            self.users.zero_()
            self.totals.zero_()

    def clear(self) -> None:
        """Drop the gradients, and what compression has kept back of them."""
        for reduction in self.reductions:
            reduction.forget()
        if self.residency.whole_state:
            for gradients in self.gradients:
                gradients.flat.zero_()
        else:
            for bucket in self.buckets:
                for parameter in bucket.parameters:
                    parameter.grad = None
        self.begin()

    def rescale(self, factor: float, kept: bool) -> None:
        """Multiply the gradients in the buckets, and with `kept` what compression has kept back of them."""
        for gradients in self.gradients:
            gradients.reduced.mul_(factor)
        if kept:
            for reduction in self.reductions:
                reduction.rescale(factor)
        for parameter in self.sparse:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    # What it holds and sends.

    def tensors(self) -> list[Tensor]:
        """All memory for gradients."""
        return [tensor for gradients in self.gradients for tensor in (gradients.flat, gradients.reduced)]

    def bytes_sent(self) -> int:
        """Bytes that a rank sends in a round, without sparse gradients."""
        ranks = self.gradient_comm.ranks
        if ranks == 1:
            return 0
        tail_bytes = 8 * (len(self.indices) + self.total_count)
        sent = 0 if self.tail_in_bucket else all_reduce_bytes(tail_bytes, ranks)
        if not self.residency.whole_state:
            return sent + sum(bucket.layout.reduce_bytes() for bucket in self.buckets)
        if self.compression is None:
            return sent + sum(all_reduce_bytes(gradients.flat.nbytes, ranks) for gradients in self.gradients)
        return sent + sum(self.compression.bytes_sent(bucket.parameters, ranks) for bucket in self.buckets)
