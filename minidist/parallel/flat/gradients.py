"""A bucket's gradients on their way: this rank's own go out, and sums over the ranks come back.

A bucket's gradients lie in one flat tensor, so one message sends many of them. Either every rank gets all
sums (`GradientsToAll`, an all-reduce), or each rank gets those of the share that it owns
(`GradientsToOwners`, a reduce-scatter). Both lie where they are sent from, with no copy before or after.
Where a rank keeps no other gradients than its share, `GradientsInLentMemory` lets go of the rest.

`GradientComm` says which ranks sum gradients and own shares, and starts the messages.

Sources: Li et al. 2020, "PyTorch Distributed", section 3.2 (gradients in buckets); Rajbhandari et al. 2020,
"ZeRO", sections 5.1 and 5.2 (shares).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.work import Group, rank_in, ranks_of
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


@dataclass(frozen=True, eq=False)
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

    def layout(
        self, param_indices: Sequence[int], tensors: Sequence[Tensor], deal: Deal = evenly
    ) -> BucketLayout:
        """Where parameters lie in flat tensors of which each of these ranks owns a share."""
        rank, copies = rank_in(self.share_group), self.ranks // self.owners
        return BucketLayout(param_indices, tensors, self.owners, rank, copies, deal)

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


class GradientsToAll:
    """Gradients of which every rank gets all sums, in place.

    flat: memory for them. Other numbers may be sent along at its end. compressed: reduces them in another
    way, as `Reduction.run` does.

    Attributes:
        views: each parameter's part of `flat`.
        reduced: (length,), the sums once they have come, this rank's own gradients before.
    """

    holds = True  # they always have memory
    begun = False  # the sums of a round always replace those before

    def __init__(
        self,
        layout: BucketLayout,
        gradient_comm: GradientComm,
        flat: Tensor,
        compressed: Callable[[], Iterator[PendingMessage]] | None = None,
    ) -> None:
        self.layout, self.gradient_comm, self._compressed = layout, gradient_comm, compressed
        self.flat, self.views, self.reduced = flat, layout.views_of(flat), flat[: layout.length]

    def reduce(self, blocking: bool = False) -> Messages:
        """Launch the reduction."""
        return Messages(self._all_reduce() if self._compressed is None else self._compressed())

    def _all_reduce(self) -> Iterator[PendingMessage]:
        """An all-reduce of the gradients and of what is sent along."""
        yield self.gradient_comm.all_reduce(self.flat)


class GradientsToOwners:
    """Gradients of which each rank gets the sums of its share. This rank's own, whole, stay.

    op: "mean" or "sum", over the ranks. flat: memory for this rank's own gradients, zeros. reduced: (share,),
    memory for this rank's share of the sums; without it they replace this rank's share of `flat`.

    Attributes:
        flat, views: (n share,), this rank's own gradients, and each parameter's part of them.
        holds: whether they have memory now.
        begun: whether the next round's sums are added to `reduced`, instead of replacing it.
    """

    holds, begun = True, False

    def __init__(
        self,
        layout: BucketLayout,
        gradient_comm: GradientComm,
        op: str,
        flat: Tensor,
        reduced: Tensor | None = None,
    ) -> None:
        self.layout, self.gradient_comm, self._op = layout, gradient_comm, op
        self.flat, self.views = flat, layout.views_of(flat)
        self.reduced = flat[layout.own_range] if reduced is None else reduced

    def reduce(self, blocking: bool = False) -> Messages:
        """Launch the reduction. blocking: complete the first message at once; see `GradientComm.start`."""
        return Messages(self._reduce_to_owners(blocking))

    def _reduce_to_owners(self, blocking: bool) -> Iterator[PendingMessage]:
        """A reduce-scatter; with hybrid sharding an all-reduce over the owners of this share follows."""
        if not self.layout.length:  # of empty parameters alone
            return
        own, reduced = self.flat[self.layout.own_range], self.reduced
        direct = not self.begun and (own.dtype, own.device) == (reduced.dtype, reduced.device)
        out = reduced if direct else own
        over, op = self.gradient_comm, self._op
        if self.layout.owners > 1:
            scatter = comm.reduce_scatter, self.flat, op, over.algorithm, over.share_group, out
            yield over.start(*scatter, blocking=blocking)
        elif out is not own:
            out.copy_(own)
        if over.hybrid is not None:
            yield over.start(comm.all_reduce, out, op, over.algorithm, over.hybrid[1])
        elsewhere = out.data_ptr() != reduced.data_ptr()
        if elsewhere and self.begun:
            reduced.add_(out.to(reduced.device))
        elif elsewhere:
            reduced.copy_(out)
        self.begun = True


@dataclass(eq=False)
class GradientMemory:
    """Memory for gradients that buckets use in turn, one at a time."""

    flat: Tensor
    holder: GradientsInLentMemory | None = None


class GradientsInLentMemory(GradientsToOwners):
    """Gradients of which a rank keeps only its share of the sums, as with ZeRO 2 and 3.

    They have memory for this rank's own, whole gradients from `borrow` to `give_back`. In between, those of
    other buckets have it.

    memory: what they borrow. reduced: (share,), memory for this rank's share of the sums.
    """

    def __init__(
        self,
        layout: BucketLayout,
        gradient_comm: GradientComm,
        op: str,
        memory: GradientMemory,
        reduced: Tensor,
    ) -> None:
        super().__init__(layout, gradient_comm, op, memory.flat[: layout.length], reduced)
        self._sending: Messages | None = None  # the reduction that is under way
        self.lend(memory)
        self.views, self.holds = [], False

    def lend(self, memory: GradientMemory) -> None:
        """Use this memory from now on."""
        self.memory, self.flat = memory, memory.flat[: self.layout.length]
        self._lent = self.flat, self.layout.views_of(self.flat), self.layout.gaps_of(self.flat)

    def borrow(self) -> None:
        """Have memory for this rank's own gradients, once those that hold it are reduced."""
        holder = self.memory.holder
        if holder and holder._sending and self.gradient_comm.may_wait(holder._sending):
            holder.complete()
        if self.memory.holder is None:
            self.memory.holder = self
            self.flat, self.views, gaps = self._lent
        else:  # it cannot be waited for, or still lacks some, as gradients come in another order than before
            self.flat = torch.zeros_like(self._lent[0])
            self.views, gaps = self.layout.views_of(self.flat), []
        self.holds = True
        if gaps:
            torch._foreach_zero_(gaps)

    def reduce(self, blocking: bool = False) -> Messages:
        """Launch the reduction, which gives the memory back at its end."""
        self._sending = super().reduce(blocking)
        return self._sending

    def _reduce_to_owners(self, blocking: bool) -> Iterator[PendingMessage]:
        yield from super()._reduce_to_owners(blocking)
        self.give_back()

    def give_back(self) -> None:
        """Let go of the whole gradients: what other ranks own of them is with their owners now.

        The memory goes to the next bucket. `ParameterSet.place` let go of the gradients that autograd made.
        """
        self.flat, self.views, self.holds = self._lent[0], [], False
        if self.memory.holder is self:
            self.memory.holder = None

    def complete(self) -> None:
        """Wait for the reduction that is under way, which then gives the memory back."""
        if self._sending is not None:
            self._sending.complete()


Gradients = GradientsToAll | GradientsToOwners
