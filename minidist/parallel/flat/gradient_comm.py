"""`GradientComm`: the ranks that gradients are summed over, and the collectives that do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.work import Group, ranks_of


class Done(NamedTuple):
    """A message that is complete already."""

    result: Tensor

    def wait(self) -> Tensor:
        """Return the result at once."""
        return self.result


PendingMessage = comm.Work | Done


class Messages:
    """Messages of which each is sent once the one before it is complete. Making it sends the first."""

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
    meets: bool = False  # whether ranks wait for each other in the backward pass for other reasons, too
    counts: bool = True  # whether the rows of the pass that runs count, and so use its parameters

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
        """The number of shares."""
        return len(ranks_of(self.share_group))

    def may_wait(self, messages: Messages) -> bool:
        """Whether a backward pass may wait for messages to be complete.

        In ring attention waiting here can deadlock: a rank without gradients for an expert sends these
        messages only after its backward pass, in which it needs this rank.
        """
        last = messages.message if self.hybrid is None else None
        return not self.meets or isinstance(last, Done) or (last is not None and last.done())

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
