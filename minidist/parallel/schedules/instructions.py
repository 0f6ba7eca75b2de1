"""The instructions of a pipeline schedule, a list for each rank, and the messages between its stages.

A model's layers are cut into `ranks * chunks` stages. A `StagePlacement` says which chunk of which rank each
stage is. A schedule from `with_messages` carries it; any other list is placed round robin.

| Kind | What the rank does with its chunk and a micro-batch |
|---|---|
| `forward` | the stage's forward pass, with the loss on the last stage |
| `backward` | the whole backward pass: gradients of the stage's input and of its weights |
| `backward_input`, `backward_weight` | the same in two parts, with other instructions between them |
| `recv_forward`, `send_forward` | receive the stage's input from the stage before; send its output on |
| `recv_backward`, `send_backward` | receive the gradient of its output; send that of its input back |

A stage hands its output to the next stage without a message if both are on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from minidist._arguments import check_whole
from minidist._names import unknown
from minidist.parallel.contract.schedule_kinds import StagePlacement, round_robin

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


instruction = lru_cache(maxsize=2**16)(Instruction)
"""An instruction as several ranks have it, made and checked once."""
Schedule = Sequence[Sequence[Instruction]]
"""For each rank its instructions, in order."""


class PlacedSchedule(list[list[Instruction]]):
    """A schedule that says where its stages are."""

    def __init__(self, instructions: Iterable[list[Instruction]], placement: StagePlacement) -> None:
        super().__init__(instructions)
        self.placement = placement

    def __repr__(self) -> str:
        return f"PlacedSchedule({super().__repr__()}, {self.placement})"


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
        if {*map(type, own)} <= {Instruction}:
            continue
        other = next((each for each in own if not isinstance(each, Instruction)), None)
        if other is not None:
            raise TypeError(
                f"the schedule has {other!r} for rank {rank}; give instructions, such as "
                "schedules.Instruction('forward', 0)"
            )


def sizes(schedule: Schedule) -> tuple[int, int, int]:
    """A schedule's numbers of ranks, micro-batches and chunks per rank; an empty one has 0 of the latter."""
    everything = [*chain(*schedule)]
    last = (max(map(attrgetter(name), everything), default=-1) for name in ("micro_batch", "chunk"))
    micro_batches, chunks = (1 + each for each in last)
    return len(schedule), micro_batches, chunks


def check_sizes(ranks: int, micro_batches: int, chunks: int, only: int | None = None, why: str = "") -> None:
    """TypeError or ValueError for sizes that a schedule does not take; `only` so many chunks, and why."""
    for name, value in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        check_whole(name, value, 1)
    if only is not None and chunks != only:
        raise ValueError(f"chunks is {chunks}, and {why}")


def only(schedule: Schedule, keeps: Callable[[Instruction], bool]) -> list[list[Instruction]]:
    """Return some instructions of a schedule, and keep its placement."""
    found = [[each for each in own if keeps(each)] for own in schedule]
    return PlacedSchedule(found, schedule.placement) if isinstance(schedule, PlacedSchedule) else found


def placement_of(schedule: Schedule) -> StagePlacement:
    """Where a schedule's stages are; ValueError if its placement is for other ranks or chunks."""
    ranks, _, chunks = sizes(schedule)
    if not isinstance(schedule, PlacedSchedule):
        return round_robin(max(ranks, 1), max(chunks, 1))
    stages = schedule.placement.stages
    if (len(stages), len(stages[0])) != (ranks, chunks):
        raise ValueError(
            f"the schedule has {ranks} ranks with {chunks} chunks each, and its placement is {stages}; give "
            "each chunk of each rank one stage"
        )
    return schedule.placement


def moved(instruction: Instruction, rank: int, placement: StagePlacement) -> StageMessage:
    """The message that an instruction sends or receives."""
    kind, before = _MOVES[instruction.kind]
    return StageMessage(kind, placement.stages[rank][instruction.chunk] - before, instruction.micro_batch)


def channel_of(message: StageMessage, placement: StagePlacement) -> Channel:
    """The channel that a message takes."""
    here, there = placement.ranks[message.stage], placement.ranks[message.stage + 1]
    return Channel(message.kind, *((here, there) if message.kind == "forward" else (there, here)))
