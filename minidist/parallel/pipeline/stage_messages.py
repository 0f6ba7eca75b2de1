"""Messages between the stages of a pipeline: sent at once, received in order, with receives posted ahead.

`broadcast_loss` sends the loss from the last stage's rank, which computes it, to the other ranks.

A stage's output is one tensor or several, such as a hidden state and a mask; gradients come back for the
floating-point ones. A receiver has to know the shapes and dtypes of what it will get. The first time that a
stage sends its output for a micro-batch of some shape, it sends that form first, and both sides remember it.
From then on receives are posted before they are needed, so that messages arrive while the rank computes.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.errors import described
from minidist.comm.mesh import duplicate_group
from minidist.comm.messages import tell_failure
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.contract.schedule_kinds import StagePlacement
from minidist.parallel.schedules.instructions import (
    Channel,
    Instruction,
    Schedule,
    StageMessage,
    channel_of,
    moved,
    placement_of,
)
from minidist.parallel.schedules.schedule_proof import CompletedSends, completed_sends

AHEAD = 2
"""Receives that are posted at a time: while the rank waits for one, the message of the other travels."""
FIRST_LOSS_TAG = 2**30
"""The first tag of the messages with the loss, above those of the stages. Each step uses the next one."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
MOST_DIMS = 8
Tensors = list[Tensor]
"""A stage's output, or the gradients of its floating-point tensors."""
TensorForm = tuple[torch.Size, torch.dtype]


class RankPlan(NamedTuple):
    """What one rank does in a schedule, and what follows from the schedule for its messages."""

    instructions: Sequence[Instruction]
    routes: Mapping[Instruction, tuple[Channel, StageMessage]]  # of each send and receive
    completed: CompletedSends
    placement: StagePlacement

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> RankPlan:
        """The plan of a rank."""
        placement, routes = placement_of(schedule), {}
        for each in schedule[rank]:
            if not each.computes:
                message = moved(each, rank, placement)
                routes[each] = channel_of(message, placement), message
        return cls(schedule[rank], routes, completed_sends(schedule)[rank], placement)


class StageMessages:
    """The messages of one rank of a pipeline's group to and from its neighbours.

    Sends the bytes of the tensors, and 80 for each output of a stage whose form is not known yet.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device
        self._forms: dict[Hashable, list[TensorForm]] = {}
        self._posted: deque[tuple[StageMessage, list[comm.Work]]] = deque()
        self._waiting: deque[Instruction] = deque()
        self._sent: dict[Instruction, list[comm.Work]] = {}
        self._plan: RankPlan  # of the schedule that runs
        self._kinds: Sequence[Hashable] = ()
        self._tag = 0
        self._lanes: dict[tuple[str, bool], Group] = {}
        if device.type == "cuda":  # messages of one NCCL group wait for each other
            for kind in ("forward", "backward"):
                for upwards in (True, False):
                    self._lanes[kind, upwards] = duplicate_group(group)

    def begin(self, plan: RankPlan, kinds: Sequence[Hashable]) -> None:
        """Start on a plan. `kinds` determine the forms of each micro-batch's activations, on all ranks."""
        self._plan, self._kinds = plan, kinds
        # The tag keeps this run from receiving messages of a failed one, and messages of another size, which
        # would end the process if ranks are given different batches.
        self._tag = next_run(self.group) * 2**14 + zlib.crc32(repr(kinds).encode()) % 2**14
        self._waiting.extend(each for each in plan.routes if each.kind.startswith("recv"))
        self.post()

    def send(self, instruction: Instruction, xs: Tensors) -> None:
        """Send an output or a gradient, without waiting. The tensors must not change until they are received.

        Raises:
            TypeError: a tensor has a dtype that is not sent, or more than 8 dimensions.
            ValueError: one has another shape or dtype than before.
        """
        channel, message = self._plan.routes[instruction]
        key, forms = self._key(message), [(x.shape, x.dtype) for x in xs]
        lane, tag = self._lane(channel), self._tag_of(channel)
        if key not in self._forms:  # the receiver does not know the forms: each tensor goes after its own
            for number, x in enumerate(xs):
                if x.dtype not in DTYPES or x.dim() > MOST_DIMS or not (number or x.is_floating_point()):
                    raise _cannot_be_sent(f"a stage gave {described(x)}")
            told = [torch.tensor(numbers).to(xs[0].device) for numbers in headers(forms)]
            xs = [part for pair in zip(told, xs, strict=True) for part in pair]
        elif self._expected(channel, key) != forms:
            before = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self._forms[key]]
            now, then = (" and ".join(map(described, each)) for each in (xs, before))
            raise ValueError(
                f"stage {message.stage} gave {now} for micro-batch {message.micro_batch} and {then} before, "
                "for inputs of the same shape; a stage's output has to have one shape and dtype for each "
                "shape of its inputs"
            )
        self._sent[instruction] = [comm.send(x, channel.destination, tag, lane, async_op=True) for x in xs]
        self._forms.setdefault(key, forms)

    def receive(self, instruction: Instruction) -> Tensors:
        """Wait for the output or the gradient that the neighbour sends."""
        channel, message = self._plan.routes[instruction]
        if not self._posted:
            self._waiting.popleft()
            lane = self._lane(channel)
            received = _receive_unknown(channel.source, lane, self.device, self._tag_of(channel))
            self._forms[self._key(message)] = [(x.shape, x.dtype) for x in received]
        else:
            expected, works = self._posted.popleft()
            assert expected == message  # as the schedule's check has proved
            received = [work.wait() for work in works]
        for sent in self._plan.completed.get(instruction, ()):
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
        sends = (route for each, route in self._plan.routes.items() if each.kind.startswith("send"))
        for channel in dict.fromkeys(channel for channel, _ in sends):
            tell_failure(channel.destination, self._tag_of(channel), self._lane(channel))

    def post(self) -> None:
        """Post receives ahead, if their shapes are known: an activation tells the shape of its gradient."""
        while self._waiting and len(self._posted) < AHEAD:
            channel, message = self._plan.routes[self._waiting[0]]
            if self._key(message) not in self._forms:
                return
            self._waiting.popleft()
            lane, tag, works = self._lane(channel), self._tag_of(channel), []
            for shape, dtype in self._expected(channel, self._key(message)):
                x = torch.empty(shape, dtype=dtype, device=self.device)
                works.append(comm.recv(x, channel.source, tag, lane, async_op=True))
            self._posted.append((message, works))

    def _key(self, message: StageMessage) -> Hashable:
        return message.stage, self._kinds[message.micro_batch]

    def _expected(self, channel: Channel, key: Hashable) -> list[TensorForm]:
        """The forms of a message's tensors: gradients come for the floating-point ones of an output."""
        forms = self._forms[key]
        return [each for each in forms if channel.kind == "forward" or each[1].is_floating_point]

    def _lane(self, channel: Channel) -> Group:
        return self._lanes.get((channel.kind, channel.source < channel.destination), self.group)

    def _tag_of(self, channel: Channel) -> int:
        return 2 * self._tag + (channel.kind == "backward")


def tensors_to_send(stage: int, outputs: object) -> Tensors:
    """A stage's output as a list of tensors; TypeError if it is something else."""
    xs: list[Any] = [*outputs] if isinstance(outputs, tuple | list) else [outputs]
    if not xs or not all(isinstance(x, Tensor) for x in xs):
        raise _cannot_be_sent(f"stage {stage} gave a {type(outputs).__name__}")
    return xs


def _cannot_be_sent(what: str) -> TypeError:
    return TypeError(
        f"{what}; between stages goes one floating-point tensor of at most {MOST_DIMS} dimensions, or a "
        "tuple of tensors of which the first is one"
    )


def headers(forms: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[list[int]]:
    """For each tensor ten numbers: its dtype and how many more tensors follow, its dimensions, its shape."""
    return [
        [DTYPES.index(dtype) + len(DTYPES) * (len(forms) - 1 - number), len(shape), *shape]
        + [0] * (MOST_DIMS - len(shape))
        for number, (shape, dtype) in enumerate(forms)
    ]


def _receive_unknown(source: int, group: Group, device: torch.device, tag: int) -> Tensors:
    """Receive tensors of unknown forms: each comes after its shape and dtype, 80 bytes."""
    received: Tensors = []
    more = 1
    while more:
        header = torch.empty(2 + MOST_DIMS, dtype=torch.int64, device=device)
        kind, dims, *sizes = comm.recv(header, source, tag, group).tolist()
        more, dtype = divmod(kind, len(DTYPES))
        x = torch.empty(sizes[:dims], dtype=DTYPES[dtype], device=device)
        received.append(comm.recv(x, source, tag, group))
    return received


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


@contextmanager
def broadcast_loss(group: Group, source: int, device: torch.device) -> Iterator[Callable[[Tensor], float]]:
    """Yield a function that gives all ranks the total of rank `source`, a float64 scalar.

    It sends 8 (p - 1) bytes. The other ranks post their receives on entry, so that `source` does not wait for
    them. Each step has its own tag, so that a message of a failed step is never taken for a later one's.
    """
    rank, tag = rank_in(group), FIRST_LOSS_TAG + next_run(group)
    coming: comm.Work | None = None
    if rank != source:
        room = torch.empty((), dtype=torch.float64, device=device)
        coming = comm.recv(room, source, tag, group, async_op=True)

    def tell(total: Tensor) -> float:
        if coming is not None:
            return float(coming.wait())
        others = (other for other in range(len(ranks_of(group))) if other != source)
        for work in [comm.send(total, other, tag, group, async_op=True) for other in others]:
            work.wait()
        return float(total)

    try:
        yield tell
    except BaseException:
        if coming is not None:
            coming.forget()
        raise
