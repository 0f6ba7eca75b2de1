"""The instructions of a pipeline schedule: a list for each rank.

A model's layers are cut into `ranks * chunks` stages. Stage s is chunk s // ranks of rank s % ranks, so a
micro-batch goes round the ranks once for each chunk (Narayanan et al. 2021, section 2.2).

| Kind | What the rank does with its chunk and a micro-batch |
|---|---|
| `forward` | the stage's forward pass, with the loss on the last stage |
| `backward` | the whole backward pass: gradients of the stage's input and of its weights |
| `backward_input`, `backward_weight` | the same in two parts, with other instructions between them |
| `recv_forward`, `send_forward` | receive the stage's input from the stage before; send its output on |
| `recv_backward`, `send_backward` | receive the gradient of its output; send that of its input back |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minidist._arguments import check_whole
from minidist._names import unknown

COMPUTE = ("forward", "backward", "backward_input", "backward_weight")
MESSAGES = ("recv_forward", "send_forward", "recv_backward", "send_backward")
KINDS = (*COMPUTE, *MESSAGES)
_SHORT = dict(zip(KINDS, ("F", "B", "I", "W", "recv F", "send F", "recv B", "send B"), strict=True))
_MOVES = {  # what a message holds, and how many stages before this one is the stage with that output
    "send_forward": ("forward", 0),
    "recv_forward": ("forward", 1),
    "send_backward": ("backward", 1),  # the gradient of the output of the stage before
    "recv_backward": ("backward", 0),
}


@dataclass(frozen=True)
class Instruction:
    """One thing that one rank does. Prints short: F3 is the forward pass of micro-batch 3.

    Raises:
        TypeError, ValueError: an unknown kind, or a number that is not a whole one of 0 or more.
    """

    kind: str  # one of KINDS
    micro_batch: int  # from 0
    chunk: int = 0  # which of the rank's chunks, from 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind of instruction", self.kind, KINDS)
        check_whole("micro_batch", self.micro_batch, 0)
        check_whole("chunk", self.chunk, 0)

    def __str__(self) -> str:
        return f"{_SHORT[self.kind]}{self.micro_batch}" + (f" of chunk {self.chunk}" if self.chunk else "")

    @property
    def computes(self) -> bool:
        """Whether it is a pass; the others are messages."""
        return self.kind in COMPUTE


Schedule = Sequence[Sequence[Instruction]]
"""For each rank its instructions, in order."""


class Channel(NamedTuple):
    """Messages of one kind from one rank to another; they arrive in the order in which they are sent."""

    kind: str  # "forward" or "backward"
    source: int
    destination: int


class StageMessage(NamedTuple):
    """One message, the same on both sides: a stage's output, or the gradient of that output."""

    kind: str  # "forward" or "backward"
    stage: int  # that computes the output
    micro_batch: int


def stage_of(rank: int, chunk: int, ranks: int) -> int:
    """The stage that a chunk of a rank holds."""
    return chunk * ranks + rank


def require_schedule(schedule: object) -> None:
    """TypeError if `schedule` is not a list of instructions for each rank."""
    if isinstance(schedule, str) or not isinstance(schedule, Sequence):
        raise TypeError(
            f"schedule is {schedule!r}; give a list of instructions for each rank, as "
            "schedules.gpipe(ranks, micro_batches) makes one"
        )
    for rank, own in enumerate(schedule):
        if isinstance(own, str) or not isinstance(own, Sequence):
            raise TypeError(f"the schedule has {own!r} for rank {rank}; give a list of instructions")
        other = next((each for each in own if not isinstance(each, Instruction)), None)
        if other is not None:
            raise TypeError(
                f"the schedule has {other!r} for rank {rank}; give instructions, such as "
                "schedules.Instruction('forward', 0)"
            )


def sizes(schedule: Schedule) -> tuple[int, int, int]:
    """A schedule's numbers of ranks, micro-batches and chunks per rank; an empty one has 0 of the latter."""
    everything = [instruction for rank in schedule for instruction in rank]
    return (
        len(schedule),
        1 + max((each.micro_batch for each in everything), default=-1),
        1 + max((each.chunk for each in everything), default=-1),
    )


def moved(instruction: Instruction, rank: int, ranks: int) -> StageMessage:
    """The message that an instruction sends or receives."""
    kind, before = _MOVES[instruction.kind]
    return StageMessage(kind, stage_of(rank, instruction.chunk, ranks) - before, instruction.micro_batch)


def message_of(instruction: Instruction, rank: int, ranks: int) -> tuple[Channel, StageMessage]:
    """The message that an instruction sends or receives, and its channel."""
    message = moved(instruction, rank, ranks)
    source, destination = message.stage % ranks, (message.stage + 1) % ranks
    if message.kind == "backward":
        source, destination = destination, source
    return Channel(message.kind, source, destination), message
