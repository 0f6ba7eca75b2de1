"""Buckets: many parameters one after the other in flat tensors, cut into one share for each rank.

Every message costs its latency, however small it is, so the ranks send flat tensors. A bucket has up to
three, with the same layout: the parameters' values, this rank's own gradients, and the summed gradients. A
rank may keep only its share of the sums. A reduce-scatter brings each rank that share, and an all-gather
brings all shares of the updated values to every rank, with no copy before or after.

`GradientComm` says which ranks sum a bucket's gradients and own its shares, and starts the messages.

Sources: Li et al. 2020, "PyTorch Distributed", section 3.2 (gradients in buckets); Rajbhandari et al. 2020,
"ZeRO", sections 5.1 and 5.2 (shares); Zhao et al. 2023, "PyTorch FSDP", sections 3.2.1 and 4.2 (values that
are freed).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.flat import freed
from minidist.parallel.flat.bucket_layout import BucketLayout, Deal, evenly


class Done(NamedTuple):
    """A message that is complete already."""

    result: Tensor

    def wait(self) -> Tensor:
        """Return the result at once."""
        return self.result


PendingMessage = comm.Work | Done


class Messages:
    """A chain of messages: each is sent when the one before it is complete. Making it sends the first."""

    def __init__(self, steps: Iterator[PendingMessage]) -> None:
        self._steps = steps
        self.message = next(steps, None)  # under way; None when all are complete

    def advance(self) -> None:
        """Wait for the message that is under way, and send the next one."""
        if self.message is not None:
            self.message.wait()
            self.message = next(self._steps, None)

    def complete(self) -> None:
        """Send all, and wait for them."""
        while self.message is not None:
            self.advance()


@dataclass(eq=False)
class GradientComm:
    """The ranks that gradients are summed over.

    With hybrid sharding, `hybrid` has two groups: the ranks that own a share each, and the ranks that own the
    same share. Otherwise all ranks own a share each. `secondary` are ranks, on one host, that together keep a
    second copy of the parameters. Sources: Zhang et al. 2022, "MiCS", section 3; Zhao et al. 2023, "PyTorch
    FSDP", section 3.2.2; Wang et al. 2023, "ZeRO++", section 3.2 (secondary shares).
    """

    group: Group
    algorithm: str = "auto"  # a name that the collectives take
    hybrid: tuple[Group, Group] | None = None
    secondary: Group = None  # None for no second copy
    waits_in_backward: bool = False  # whether ranks also wait for each other in it, as in a ring
    pass_has_rows: bool = True  # False in a pass of padding, which uses no parameters

    @classmethod
    def over(cls, group: Group | GradientComm) -> GradientComm:
        """The ranks of a group that own a share each; what is a GradientComm stays."""
        return group if isinstance(group, GradientComm) else cls(group)

    @property
    def ranks(self) -> int:
        """The number of ranks, this one included."""
        return len(ranks_of(self.group))

    @property
    def share_group(self) -> Group:
        """The ranks that own a share each."""
        return self.group if self.hybrid is None else self.hybrid[0]

    @property
    def owners(self) -> int:
        """How many ranks own a share each."""
        return len(ranks_of(self.share_group))

    def may_wait(self, messages: Messages) -> bool:
        """Whether a backward pass may wait for messages to be complete.

        In ring attention waiting here can deadlock: a rank without gradients for an expert sends these
        messages only after its backward pass, in which it needs this rank.
        """
        last = messages.message if self.hybrid is None else None
        return not self.waits_in_backward or isinstance(last, Done) or (last is not None and last.done())

    def start(self, collective: Callable[..., Any], *args: Any, blocking: bool = False) -> PendingMessage:
        """Start a collective.

        blocking: complete it in this thread. Where nothing is left to compute, handing a message to another
        thread only costs time.
        """
        if blocking:
            return Done(collective(*args))
        message: PendingMessage = collective(*args, async_op=True)
        return message

    def all_reduce(self, x: Tensor, blocking: bool = False) -> PendingMessage:
        """Start to sum `x` over the ranks, in place."""
        return self.start(comm.all_reduce, x, "sum", self.algorithm, self.group, blocking=blocking)

    def all_gather(self, x: Tensor, blocking: bool = False) -> PendingMessage:
        """Start to gather `x`, (k, ...), from all ranks: the result is (n k, ...)."""
        return self.start(comm.all_gather, x, self.algorithm, self.group, blocking=blocking)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device, group: Group = None) -> Tensor:
        """Flat memory for messages. A collective: on a CPU the ranks of `group`, or the owners, share it."""
        if device.type == "cpu":
            return comm.empty_shared((numel,), dtype, group or self.share_group)
        return torch.zeros(numel, dtype=dtype, device=device)


@dataclass(eq=False)
class GradientMemory:
    """Memory for gradients that buckets use in turn, one at a time."""

    flat: Tensor
    holder: Bucket | None = None


class Bucket(BucketLayout):
    """Parameters of one dtype on one device in flat tensors of n shares.

    param_indices, tensors, deal: see `BucketLayout`; of tensors a shape, a dtype and a device are
    enough. gradient_comm: the ranks that own a share each; None for one share. name_of: a parameter's name,
    for messages.

    Attributes:
        values: (n share,), the parameters, and zeros between or behind them.
        shard: (share,), this rank's part of the values; a view of them if they stay.
        gradients, views: (n share,), this rank's own gradients, and each parameter's part of them. Other
            numbers may be sent along at the end. holds: whether there is memory for them now.
        reduced: (share,), this rank's part of the gradients, summed over the ranks.
        op: "mean" or "sum", over the ranks. everyone: the ranks that all get the sums, where no rank owns a
            share alone. reduction: reduces in another way, as `Reduction.run` does.
        secondary, is_fresh: this rank's part of a second copy that the ranks of a host share, and whether it
            has the present values.
        begun: whether the next gradients are added to `reduced`, instead of replacing it.
    """

    values: Tensor
    shard: Tensor
    gradients: Tensor
    views: list[Tensor]
    reduced: Tensor | None = None
    secondary: Tensor | None = None
    everyone: GradientComm | None = None
    reduction: Callable[[], Iterator[PendingMessage]] | None = None
    op = "mean"
    begun = holds = is_fresh = False

    def __init__(
        self,
        param_indices: Sequence[int],
        tensors: Sequence[Tensor],
        gradient_comm: GradientComm | None = None,
        deal: Deal = evenly,
        device: torch.device | None = None,
        name_of: Callable[[int], str] = str,
    ) -> None:
        owners, rank, copies = 1, 0, 1
        if gradient_comm is not None:
            self.gradient_comm, owners = gradient_comm, gradient_comm.owners
            rank, copies = rank_in(gradient_comm.share_group), gradient_comm.ranks // owners
        super().__init__(param_indices, tensors, owners, rank, copies, deal)
        self.parameters = [tensors[index] for index in param_indices]
        self.device, self._name_of = device or self.parameters[0].device, name_of
        self._memory: GradientMemory | None = None
        self._sending: Messages | None = None  # the reduction that is under way
        self.frees = False  # the values have memory only from `gather` to `free`
        self.frozen = False  # its parameters get no gradients, and the optimizer has no slices of it
        self._gathering: PendingMessage | None = None

    # Gradients: this rank's own come to `views`; `reduce` brings each rank its share of the sums.

    def hold(self, flat: Tensor) -> None:
        """Keep this rank's own gradients in `flat`."""
        self.gradients, self.views, self.holds = flat, self.views_of(flat), True
        for gap in self.gaps_of(flat):
            gap.zero_()

    def lend(self, memory: GradientMemory) -> None:
        """Have memory for gradients only until they are reduced, and share it with other buckets."""
        self._memory, self.gradients = memory, memory.flat[: self.length]
        self._lent = self.gradients, self.views_of(self.gradients), self.gaps_of(self.gradients)

    def borrow(self) -> None:
        """Have memory for this rank's own gradients, once a bucket that holds it is reduced."""
        assert self._memory is not None
        holder = self._memory.holder
        if holder and holder._sending and self.gradient_comm.may_wait(holder._sending):
            holder.complete()
        if self._memory.holder is None:
            self._memory.holder, self.holds = self, True
            self.gradients, self.views, gaps = self._lent
            if gaps:
                torch._foreach_zero_(gaps)
        else:  # it cannot be waited for, or still lacks some, as gradients come in another order than before
            self.hold(torch.zeros(self.length, dtype=self.dtype, device=self.device))

    def reduce(self, blocking: bool = False) -> Messages:
        """Launch the reduction of the gradients: to everyone or to their owners, or as `reduction` does it.

        blocking: complete the first message at once; see `GradientComm.start`.
        """
        if self.reduction is not None:
            steps = self.reduction()
        elif self.everyone is not None:
            steps = self._reduce_to_everyone(self.everyone)
        else:
            steps = self._reduce_to_owners(blocking)
        self._sending = Messages(steps)
        return self._sending

    def _reduce_to_everyone(self, over: GradientComm) -> Iterator[PendingMessage]:
        """An all-reduce, in place, of the gradients and of what is sent along."""
        yield over.all_reduce(self.gradients)

    def _reduce_to_owners(self, blocking: bool) -> Iterator[PendingMessage]:
        """A reduce-scatter; with hybrid sharding an all-reduce over the owners of this share follows."""
        if not self.length:
            return
        assert self.reduced is not None
        own = self.gradients[self.own_range]
        direct = not self.begun and (own.dtype, own.device) == (self.reduced.dtype, self.reduced.device)
        out = self.reduced if direct else own
        over, op = self.gradient_comm, self.op
        if self.owners > 1:
            scatter = comm.reduce_scatter, self.gradients, op, over.algorithm, over.share_group, out
            yield over.start(*scatter, blocking=blocking)
        elif out is not own:
            out.copy_(own)
        if over.hybrid is not None:
            yield over.start(comm.all_reduce, out, op, over.algorithm, over.hybrid[1])
        if out.data_ptr() != self.reduced.data_ptr():
            self.reduced.add_(out.to(self.reduced.device)) if self.begun else self.reduced.copy_(out)
        self.begun = True
        self.give_back()

    def give_back(self) -> None:
        """Let go of the whole gradients: what other ranks own of them is with their owners now.

        With ZeRO 2 and 3 the bucket's memory is lent, and goes to the next bucket. Where whole gradients stay
        (`hold`), this does nothing. `ParameterSet.place` let go of the gradients that autograd made.
        """
        if self._memory is not None:
            self.gradients, self.views, self.holds = self._lent[0], [], False
            if self._memory.holder is self:
                self._memory.holder = None

    def complete(self) -> None:
        """Wait for the reduction, and give lent memory back."""
        if self._sending is not None:
            self._sending.complete()

    # Values: whole on every rank between steps (ZeRO 1 and 2), or only this rank's share (ZeRO 3).

    def keep_values(self) -> None:
        """Make the parameters views into `values`, and `shard` this rank's share of it. A collective."""
        self.values = self.gradient_comm.zeros(self.length, self.dtype, self.device)
        for parameter, view in zip(self.parameters, self.views_of(self.values), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.shard = self.values[self.own_range]
        self._shown = _addresses(self.parameters)

    def keep_share(self, shard: Tensor) -> None:
        """Keep this rank's share in `shard`; `values` get memory only from `gather` to `free`.

        Freed, `values` keep their identity in torch with a storage of no bytes: tensors that autograd saved
        for the backward pass have their values again after the next gather. The parameters are then a single
        NaN, expanded to their shapes, and reading one raises RuntimeError (freed.py).
        """
        self.shard, self.frees = shard, True
        nothing = torch.zeros((), dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point:
            nothing.fill_(math.nan)
        self._hidden = [nothing.expand(shape) for shape in self.shapes]
        self._unseen, self._names = _addresses(self._hidden), [*map(self._name_of, self.param_indices)]
        self._make_values()

    def _make_values(self) -> None:
        self.values = torch.empty(self.length, dtype=self.dtype, device=self.device)
        self._storage, self._bytes = self.values.untyped_storage(), self.values.nbytes
        self._visible = self.views_of(self.values)
        self._storage.resize_(0)

    @torch.no_grad()
    def load_from_rank0(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keep this rank's share of rank 0's values of the parameters, and free the rest. A collective."""
        self.parameters = [*parameters]
        self._storage.resize_(self._bytes)
        for view, parameter in zip(self._visible, parameters, strict=True):
            view.copy_(parameter)
        self.values[self.elements :] = 0
        comm.broadcast(self.values, group=self.gradient_comm.group)
        self.shard.copy_(self.values[self.own_range])
        self.free()

    def gather(self, blocking: bool = False) -> None:
        """Launch the all-gather of the shares into `values`; a rank sends n - 1 times its share's bytes.

        blocking: complete it at once; see `GradientComm.start`.
        """
        if self.frees:
            self._storage.resize_(self._bytes)
        elif self.owners == 1 or not self.share:
            return
        over, share, group = self.gradient_comm, self.shard.to(self.device), self.gradient_comm.share_group
        if self.secondary is not None and self.is_fresh:
            share, group = self.secondary, over.secondary
        gather = comm.all_gather, share, over.algorithm, group, self.values
        self._gathering = over.start(*gather, blocking=blocking)

    def wait(self) -> None:
        """Complete the all-gather."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            if self.secondary is not None and not self.is_fresh:
                own, share = rank_in(self.gradient_comm.secondary), len(self.secondary)
                self.secondary.copy_(self.values[own * share : (own + 1) * share])
                self.is_fresh = True

    def show(self) -> None:
        """Make the parameters views into the gathered values."""
        self.wait()
        freed.show(self.parameters)
        self._refuse_reassigned(self._unseen)
        for parameter, view in zip(self.parameters, self._visible, strict=True):
            parameter.data = view

    def free(self) -> None:
        """Give the memory of the gathered values back."""
        self.wait()
        freed.hide(self.parameters, self._hidden, self._names)
        if self._storage.resizable():
            self._storage.resize_(0)
        else:  # NumPy has seen it; its memory is free once the backward pass no longer needs it
            self._make_values()

    def refuse_reassigned(self) -> None:
        """ValueError where `parameter.data = tensor` has taken a parameter out of `values`.

        `torch.nn.utils.vector_to_parameters` makes that assignment for every parameter of a model. The ranks
        go on updating and sending the flat tensor, so the parameter would never be trained again.
        """
        self._refuse_reassigned(_addresses(self._visible) if self.frees else self._shown)

    def _refuse_reassigned(self, expected: Sequence[object]) -> None:
        found = _addresses(self.parameters)
        if found == expected:
            return
        index = next(i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
        raise ValueError(
            f"the parameter {self._name_of(self.param_indices[index])} was given other memory, as "
            "`parameter.data = tensor` and module.to(dtype) do, and has to stay in the flat memory of the "
            "ranks; write into it instead: `with torch.no_grad(): parameter.copy_(tensor)`"
        )


def _addresses(tensors: Sequence[Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    """Where each tensor begins in memory, and its strides: one comparison shows a reassigned one."""
    return [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]
