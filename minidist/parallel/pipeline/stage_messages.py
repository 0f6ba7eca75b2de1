"""Messages between the stages of a pipeline: sent at once, received in order, and posted ahead.

A receiver has to know what it will get. The first time that a stage's output for a micro-batch of some shape
is sent, its shape and dtype go before it; both sides remember them. From then on receives are posted before
they are needed, so that messages arrive while the rank computes.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.failures import described
from minidist.comm.messages import tell_failure
from minidist.comm.transport.duplicate_group import duplicate_group
from minidist.comm.work import Group, ranks_of
from minidist.parallel.pipeline.instructions import Channel, Instruction, StageMessage, message_of
from minidist.parallel.pipeline.send_completion import CompletionPlan, Receipts

AHEAD = 2
"""Receives that are posted at a time: one is waited for while the other one's message travels."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MOST_DIMS = 8
TensorForm = tuple[torch.Size, torch.dtype]


class StageMessages:
    """One rank's messages to and from its neighbours.

    Bytes sent: those of the tensors; and 80 for each output of a stage whose form is not known yet.

    Args:
        group: the ranks of the pipeline.
        rank: this one's place among them.
        device: where the tensors are.
    """

    def __init__(self, group: Group, rank: int, device: torch.device) -> None:
        self.group, self.rank, self.device = group, rank, device
        self.ranks = len(ranks_of(group))
        self._forms: dict[Hashable, TensorForm] = {}
        self._posted: deque[tuple[StageMessage, comm.Work]] = deque()
        self._waiting: deque[Instruction] = deque()
        self._sent: dict[Instruction, list[comm.Work]] = {}
        self._receipts: Receipts = {}
        self._kinds: Sequence[Hashable] = ()
        self._tag = 0
        self._channels: list[Channel] = []  # along which this rank sends
        self._lanes: dict[tuple[str, bool], Group] = {}
        if needs_lanes(device):
            for kind in ("forward", "backward"):
                for upwards in (True, False):
                    self._lanes[kind, upwards] = duplicate_group(group)

    def begin(self, plan: CompletionPlan, kinds: Sequence[Hashable]) -> None:
        """Start on this rank's part of a schedule.

        Args:
            plan: the instructions, and when it is known that what they send has been received.
            kinds: for each micro-batch what the forms of its activations follow from, the same on all ranks.
        """
        self._kinds, self._receipts = kinds, plan.receipts
        # What a failed run has left behind is never taken for this one's; nor are messages of another size,
        # which would end the process, where ranks are given different batches.
        self._tag = next_run(self.group) * 2**14 + zlib.crc32(repr(kinds).encode()) % 2**14
        sends = (each for each in plan.instructions if each.kind.startswith("send"))
        self._channels = [*dict.fromkeys(message_of(each, self.rank, self.ranks)[0] for each in sends)]
        self._waiting.extend(each for each in plan.instructions if each.kind.startswith("recv"))
        self._post()

    def send(self, instruction: Instruction, x: Tensor) -> None:
        """Send an output or a gradient, without waiting. `x` must not change until it is received.

        Raises:
            TypeError, ValueError: it is no tensor to send; or another one than before.
        """
        channel, message = message_of(instruction, self.rank, self.ranks)
        key, form = self._key(message), (x.shape, x.dtype)
        if key not in self._forms:
            works = send_unknown(x, channel.destination, self._lane(channel), self._tag_of(channel))
            self._sent[instruction] = works
            self._forms[key] = form
            return
        if self._forms[key] != form:
            shape, dtype = self._forms[key]
            raise ValueError(
                f"stage {message.stage} gave {described(x)} for micro-batch {message.micro_batch} and "
                f"{described(torch.empty(shape, dtype=dtype, device='meta'))} before, for inputs of the same "
                "shape; a stage's output has to have one shape and dtype for each shape of its inputs"
            )
        tag = self._tag_of(channel)
        self._sent[instruction] = [comm.send(x, channel.destination, tag, self._lane(channel), async_op=True)]

    def receive(self, instruction: Instruction) -> Tensor:
        """The output or the gradient that the neighbour sends.

        Raises:
            CollectiveError: it is gone or late.
        """
        channel, message = message_of(instruction, self.rank, self.ranks)
        if not self._posted:
            self._waiting.popleft()
            received = receive_unknown(
                channel.source, self._lane(channel), self.device, self._tag_of(channel)
            )
            self._forms[self._key(message)] = received.shape, received.dtype
        else:
            expected, work = self._posted.popleft()
            assert expected == message  # as the schedule's check has proved
            received = work.wait()
        for sent in self._receipts.get(instruction, ()):
            self._complete(sent)
        self._post()
        return received

    def post(self) -> None:
        """Post receives for which there is room: once a forward pass has told the form of its gradient."""
        self._post()

    def finish(self) -> None:
        """Wait until all that was sent is received."""
        for sent in [*self._sent]:
            self._complete(sent)

    def _complete(self, sent: Instruction) -> None:
        """Let go of what was sent, which does not wait where it has been received."""
        for work in self._sent.pop(sent):
            work.wait()

    def drop(self) -> None:
        """Give up on what is under way, after a failure, and tell the neighbours that wait for this rank.

        Each of them fails, too, and tells its own, so that no stage of this host waits in vain.
        """
        sent = [work for works in self._sent.values() for work in works]
        for work in [*sent, *(work for _, work in self._posted)]:
            work.forget()
        self._sent.clear()
        self._posted.clear()
        self._waiting.clear()
        for channel in self._channels:
            tell_failure(channel.destination, self._tag_of(channel), self._lane(channel))

    def _key(self, message: StageMessage) -> Hashable:
        return message.stage, self._kinds[message.micro_batch]

    def _post(self) -> None:
        while self._waiting and len(self._posted) < AHEAD:
            channel, message = message_of(self._waiting[0], self.rank, self.ranks)
            if self._key(message) not in self._forms:
                return
            self._waiting.popleft()
            shape, dtype = self._forms[self._key(message)]
            x = torch.empty(shape, dtype=dtype, device=self.device)
            work = comm.recv(x, channel.source, self._tag_of(channel), self._lane(channel), async_op=True)
            self._posted.append((message, work))

    def _lane(self, channel: Channel) -> Group:
        return self._lanes.get((channel.kind, channel.source < channel.destination), self.group)

    def _tag_of(self, channel: Channel) -> int:
        return 2 * self._tag + (channel.kind == "backward")


_runs: dict[Group, int] = {}
"""How often pipelines over a group have run, so that each run has tags of its own."""


def agree_on_runs(group: Group) -> None:
    """Have all ranks of a group count on from the same number; a collective, of 2 (n - 1) / n 8 bytes."""
    last = torch.tensor([_runs.get(group, 0)], device=comm.device())
    _runs[group] = int(comm.all_reduce(last, "max", group=group))


def next_run(group: Group) -> int:
    """A number below 2^14, the same on all ranks."""
    _runs[group] = _runs.get(group, 0) + 1
    return _runs[group] % 2**14


def needs_lanes(device: torch.device) -> bool:
    """Whether messages between two ranks wait for each other, unless they go by groups of their own."""
    return device.type == "cuda"


def send_unknown(x: Tensor, destination: int, group: Group, tag: int = 0) -> list[comm.Work]:
    """Send a tensor whose shape and dtype the receiver does not know, in 80 bytes before it.

    Raises:
        TypeError: it is not floating-point, or has more than 8 dimensions.
    """
    if x.dtype not in DTYPES or x.dim() > MOST_DIMS:
        raise TypeError(
            f"a stage gave {described(x)}; between stages goes one floating-point tensor of at most "
            f"{MOST_DIMS} dimensions"
        )
    header = torch.tensor([DTYPES.index(x.dtype), x.dim(), *x.shape, *[0] * (MOST_DIMS - x.dim())])
    parts = header.to(x.device), x
    return [comm.send(part, destination, tag, group, async_op=True) for part in parts]


def receive_unknown(source: int, group: Group, device: torch.device, tag: int = 0) -> Tensor:
    """Receive what `send_unknown` sends."""
    header = torch.empty(2 + MOST_DIMS, dtype=torch.int64, device=device)
    dtype, dims, *sizes = comm.recv(header, source, tag, group).tolist()
    return comm.recv(torch.empty(sizes[:dims], dtype=DTYPES[dtype], device=device), source, tag, group)
