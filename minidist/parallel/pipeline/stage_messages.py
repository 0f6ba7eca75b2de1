"""Messages between the stages of a pipeline: sent at once, received in order, with receives posted ahead.

`broadcast_loss` sends the loss from the last rank, which computes it, to the other ranks.

A stage's output is one tensor or several, such as a hidden state and a mask; gradients come back for the
floating-point ones. A receiver has to know the shapes and dtypes of what it will get. The first time that a
stage sends its output for a micro-batch of some shape, it sends that form first, and both sides remember it.
From then on receives are posted before they are needed, so that messages arrive while the rank computes.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.mesh import duplicate_group
from minidist.comm.messages import tell_failure
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.pipeline.instructions import Channel, Instruction, StageMessage, message_of
from minidist.parallel.pipeline.send_completion import CompletedSends
from minidist.parallel.pipeline.stage_outputs import Tensors, in_words, receive_unknown, send_unknown

AHEAD = 2
"""Receives that are posted at a time: while the rank waits for one, the message of the other travels."""
FIRST_LOSS_TAG = 2**30
"""The first tag of the messages with the loss, above those of the stages. Each step uses the next one."""
TensorForm = tuple[torch.Size, torch.dtype]


class StageMessages:
    """The messages of one `rank` of a pipeline's group to and from its neighbours.

    Sends the bytes of the tensors, and 80 for each output of a stage whose form is not known yet.
    """

    def __init__(self, group: Group, rank: int, device: torch.device) -> None:
        self.group, self.rank, self.device = group, rank, device
        self.ranks = len(ranks_of(group))
        self._forms: dict[Hashable, list[TensorForm]] = {}
        self._posted: deque[tuple[StageMessage, list[comm.Work]]] = deque()
        self._waiting: deque[Instruction] = deque()
        self._sent: dict[Instruction, list[comm.Work]] = {}
        self._completed: CompletedSends = {}
        self._kinds: Sequence[Hashable] = ()
        self._tag = 0
        self._channels: list[Channel] = []  # along which this rank sends
        self._lanes: dict[tuple[str, bool], Group] = {}
        if needs_lanes(device):
            for kind in ("forward", "backward"):
                for upwards in (True, False):
                    self._lanes[kind, upwards] = duplicate_group(group)

    def begin(
        self, instructions: Sequence[Instruction], completed: CompletedSends, kinds: Sequence[Hashable]
    ) -> None:
        """Start on this rank's instructions, of which each receive acknowledges the sends in `completed`.

        `kinds` determine the forms of each micro-batch's activations, and are the same on all ranks.
        """
        self._kinds, self._completed = kinds, completed
        # The tag keeps this run from receiving messages of a failed one, and messages of another size, which
        # would end the process if ranks are given different batches.
        self._tag = next_run(self.group) * 2**14 + zlib.crc32(repr(kinds).encode()) % 2**14
        sends = (each for each in instructions if each.kind.startswith("send"))
        self._channels = [*dict.fromkeys(message_of(each, self.rank, self.ranks)[0] for each in sends)]
        self._waiting.extend(each for each in instructions if each.kind.startswith("recv"))
        self.post()

    def send(self, instruction: Instruction, xs: Tensors) -> None:
        """Send an output or a gradient, without waiting. The tensors must not change until they are received.

        Raises:
            TypeError: a tensor has a dtype that is not sent, or more than 8 dimensions.
            ValueError: one has another shape or dtype than before.
        """
        channel, message = message_of(instruction, self.rank, self.ranks)
        key, forms = self._key(message), [(x.shape, x.dtype) for x in xs]
        lane, tag = self._lane(channel), self._tag_of(channel)
        if key not in self._forms:
            self._sent[instruction] = send_unknown(xs, channel.destination, lane, tag)
            self._forms[key] = forms
            return
        if self._expected(channel, key) != forms:
            before = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self._forms[key]]
            raise ValueError(
                f"stage {message.stage} gave {in_words(xs)} for micro-batch {message.micro_batch} and "
                f"{in_words(before)} before, for inputs of the same "
                "shape; a stage's output has to have one shape and dtype for each shape of its inputs"
            )
        self._sent[instruction] = [comm.send(x, channel.destination, tag, lane, async_op=True) for x in xs]

    def receive(self, instruction: Instruction) -> Tensors:
        """Wait for the output or the gradient that the neighbour sends."""
        channel, message = message_of(instruction, self.rank, self.ranks)
        if not self._posted:
            self._waiting.popleft()
            lane = self._lane(channel)
            received = receive_unknown(channel.source, lane, self.device, self._tag_of(channel))
            self._forms[self._key(message)] = [(x.shape, x.dtype) for x in received]
        else:
            expected, works = self._posted.popleft()
            assert expected == message  # as the schedule's check has proved
            received = [work.wait() for work in works]
        for sent in self._completed.get(instruction, ()):
            self._complete(sent)
        self.post()
        return received

    def finish(self) -> None:
        """Wait until all that was sent is received."""
        for sent in [*self._sent]:
            self._complete(sent)

    def _complete(self, sent: Instruction) -> None:
        """Free the tensor of a send. Its wait returns at once if it is known to be received."""
        for work in self._sent.pop(sent):
            work.wait()

    def drop(self) -> None:
        """After a failure, give up on all messages under way and tell the neighbours that wait for this rank.

        Each neighbour then fails and tells its own neighbours, so that no stage of this host waits in vain.
        """
        sent = [work for works in self._sent.values() for work in works]
        for work in [*sent, *(work for _, works in self._posted for work in works)]:
            work.forget()
        self._sent.clear()
        self._posted.clear()
        self._waiting.clear()
        for channel in self._channels:
            tell_failure(channel.destination, self._tag_of(channel), self._lane(channel))

    def _key(self, message: StageMessage) -> Hashable:
        return message.stage, self._kinds[message.micro_batch]

    def post(self) -> None:
        """Post receives ahead, as far as their forms are known: a forward pass tells that of its gradient."""
        while self._waiting and len(self._posted) < AHEAD:
            channel, message = message_of(self._waiting[0], self.rank, self.ranks)
            if self._key(message) not in self._forms:
                return
            self._waiting.popleft()
            lane, tag, works = self._lane(channel), self._tag_of(channel), []
            for shape, dtype in self._expected(channel, self._key(message)):
                x = torch.empty(shape, dtype=dtype, device=self.device)
                works.append(comm.recv(x, channel.source, tag, lane, async_op=True))
            self._posted.append((message, works))

    def _expected(self, channel: Channel, key: Hashable) -> list[TensorForm]:
        """The forms of a message's tensors: gradients come for the floating-point ones of an output."""
        forms = self._forms[key]
        return [each for each in forms if channel.kind == "forward" or each[1].is_floating_point]

    def _lane(self, channel: Channel) -> Group:
        return self._lanes.get((channel.kind, channel.source < channel.destination), self.group)

    def _tag_of(self, channel: Channel) -> int:
        return 2 * self._tag + (channel.kind == "backward")


_runs: dict[Group, int] = {}
"""How often pipelines over a group have run: each run has its own tags."""


def agree_on_runs(group: Group) -> None:
    """Start all ranks of a group from the same number of runs; a collective, of 2 (n - 1) / n 8 bytes."""
    last = torch.tensor([_runs.get(group, 0)], device=comm.device())
    _runs[group] = int(comm.all_reduce(last, "max", group=group))


def next_run(group: Group) -> int:
    """The number of the next run, modulo 2^14; the same on all ranks."""
    _runs[group] = _runs.get(group, 0) + 1
    return _runs[group] % 2**14


def needs_lanes(device: torch.device) -> bool:
    """Whether each channel needs a group of its own, as with NCCL, where messages wait for each other."""
    return device.type == "cuda"


@contextmanager
def broadcast_loss(group: Group, device: torch.device) -> Iterator[Callable[[Tensor], float]]:
    """Yield a function that gives all ranks the last rank's total, a float64 scalar; sends 8 (p - 1) bytes.

    The other ranks post their receives on entry, so that the last rank does not wait for them. Each step has
    its own tag, so that a message of a failed step is never taken for that of a later one.
    """
    rank, last = rank_in(group), len(ranks_of(group)) - 1
    tag = FIRST_LOSS_TAG + next_run(group)
    coming: comm.Work | None = None
    if rank < last:
        room = torch.empty((), dtype=torch.float64, device=device)
        coming = comm.recv(room, last, tag, group, async_op=True)

    def tell(total: Tensor) -> float:
        if coming is not None:
            return float(coming.wait())
        for work in [comm.send(total, other, tag, group, async_op=True) for other in range(last)]:
            work.wait()
        return float(total)

    try:
        yield tell
    except BaseException:
        if coming is not None:
            coming.forget()
        raise
