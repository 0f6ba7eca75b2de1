"""What follows from a schedule alone, without a process: that ranks can execute it, and what they then know.

`check` looks at each rank's list first, then at the order of the messages on each channel. Last it executes
everything once by `replay`, with the rules of `Pipeline`: a send returns at once and keeps its tensor until
it is received; a receive waits for its message. So ranks wait for each other in receives alone, and one
execution proves all: if every rank comes to its end in one order of events, it does so in every order. (If
sends waited for their receivers, 1F1B would hang: neighbours send to each other at the same time.)

`completed_sends` finds when a rank knows that a tensor it sent has been received, so that its memory can be
freed. A message tells its receiver what the sender had done by then, and what the sender had heard of others:
a vector clock. These clocks follow from the schedule, so nothing is sent for them. On 4 ranks with 16
micro-batches a rank keeps at most 16 sent tensors in GPipe, 4 in 1F1B and zero bubble, and 7 interleaved with
2 or 4 chunks. Told only what its direct neighbour has received, it would keep 11 and 19 interleaved. If a
gradient's arrival acknowledged nothing but its own output, it would keep 32 and 64, and 16 in 1F1B.

Source: Fidge 1988 and Mattern 1989 on vector clocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from minidist.parallel.contract.schedule_kinds import StagePlacement
from minidist.parallel.schedules.instructions import (
    COMPUTE,
    Channel,
    Instruction,
    Schedule,
    StageMessage,
    channel_of,
    moved,
    placement_of,
    require_schedule,
    sizes,
)

CompletedSends = Mapping[Instruction, Sequence[Instruction]]
"""For each receive of a rank: the sends that have certainly been received once it is complete."""
Index = Mapping[tuple[str, int, int], int]
"""The index in its rank's list of the instruction of a kind, micro-batch and chunk."""


class Deadlock(ValueError):
    """Every rank that has instructions left waits, at a receive, for a message that nobody will send.

    `waiting` has for each such rank the receive, and the rank that it waits for. `simulate` adds what
    the ranks did until then: for each its passes, with their beginnings and ends.
    """

    def __init__(self, waiting: Mapping[int, Instruction], placement: StagePlacement) -> None:
        self.waiting = {
            rank: (each, channel_of(moved(each, rank, placement), placement).source)
            for rank, each in waiting.items()
        }
        self.timeline: Sequence[Sequence[tuple[Instruction, float, float]]] = ()
        said = ", ".join(
            f"rank {rank} waits at {each} for rank {of}" for rank, (each, of) in self.waiting.items()
        )
        super().__init__(f"the schedule never ends: {said}")


def replay(schedule: Schedule) -> Iterator[tuple[int, Instruction, StageMessage | None]]:
    """Yield every instruction, after all that it depends on, with its rank and the message that it moves.

    Each rank runs as far as it can before the next rank has its turn. Raises Deadlock if no rank can go on.
    """
    placement = placement_of(schedule)
    done = [0] * len(schedule)  # instructions of each rank
    sent: set[StageMessage] = set()
    while left := {rank: own[done[rank]] for rank, own in enumerate(schedule) if done[rank] < len(own)}:
        before = sum(done)
        for rank in left:
            own = schedule[rank]
            for index in range(done[rank], len(own)):
                each, message = own[index], None
                if each.kind not in COMPUTE:
                    message = moved(each, rank, placement)
                    if each.kind.startswith("send"):
                        sent.add(message)
                    elif message not in sent:
                        break
                yield rank, each, message
                done[rank] += 1
        if sum(done) == before:
            raise Deadlock(left, placement)


def check(schedule: Schedule, micro_batches: int | None = None, chunks: int | None = None) -> None:
    """Prove that the ranks can execute a schedule, and that they then train on every micro-batch.

    Each stage runs each micro-batch forward once and backward once, whole or in two parts. Each pass comes
    after what it needs. Each message is sent once and received once, in the same order on both sides. No rank
    waits for ever.

    Args:
        micro_batches, chunks: how many there have to be; None for as many as the schedule has.

    Raises:
        TypeError: it is not a list of instructions for each rank.
        ValueError: a rule is broken; names the rule, the rank and the instruction.
    """
    check_rules(schedule, micro_batches, chunks)
    for _ in replay(schedule):
        pass  # raises Deadlock where no rank can go on


def check_rules(schedule: Schedule, micro_batches: int | None = None, chunks: int | None = None) -> None:
    """All of `check` but the replay, for a caller that replays the schedule anyway."""
    require_schedule(schedule)
    ranks, found_micro_batches, found_chunks = sizes(schedule)
    if not ranks or not found_micro_batches:
        raise ValueError("the schedule is empty; give a list of instructions for each rank")
    for name, wanted, found in (
        ("micro-batches", micro_batches, found_micro_batches),
        ("chunks a rank", chunks, found_chunks),
    ):
        if wanted is not None and wanted != found:
            raise ValueError(f"the schedule has {found} {name} and should have {wanted}")
    placement = placement_of(schedule)
    for rank, own in enumerate(schedule):
        index = {(each.kind, each.micro_batch, each.chunk): i for i, each in enumerate(own)}
        if len(index) < len(own):
            twice = next(each for each in own if own.count(each) > 1)
            raise ValueError(
                f"rank {rank} has {twice} {own.count(twice)} times; each instruction is there once"
            )
        _check_complete(rank, index, found_micro_batches, placement)
        _check_order(rank, index, placement)
    _check_channels(schedule, placement)


def messages_of(rank: int, chunk: int, placement: StagePlacement) -> list[str]:
    """The kinds of message by which a rank's chunk exchanges tensors with the stages before and after it."""
    own, found = placement.stages[rank], []
    if own[chunk] > 0 and own[chunk] - 1 not in own:
        found += ["recv_forward", "send_backward"]
    if own[chunk] < len(placement.ranks) - 1 and own[chunk] + 1 not in own:
        found += ["send_forward", "recv_backward"]
    return found


def _check_complete(rank: int, index: Index, micro_batches: int, placement: StagePlacement) -> None:
    found: dict[tuple[int, int], set[str]] = defaultdict(set)
    for kind, micro_batch, chunk in index:
        found[micro_batch, chunk].add(kind)
    for chunk in range(len(placement.stages[rank])):
        needed = {*messages_of(rank, chunk, placement)}
        for micro_batch in range(micro_batches):
            kinds = found[micro_batch, chunk]
            where = f"rank {rank}, micro-batch {micro_batch}, chunk {chunk}"
            passes = kinds & {"backward", "backward_input", "backward_weight"}
            for kind, there in (("forward", "forward" in kinds), ("backward", passes)):
                if not there:
                    wanted = Instruction(kind, micro_batch, chunk)
                    raise ValueError(f"{where}: there is no {kind} pass ({wanted})")
            if passes not in ({"backward"}, {"backward_input", "backward_weight"}):
                raise ValueError(
                    f"{where}: the backward pass is {sorted(passes)}; it is either 'backward' or both "
                    "'backward_input' and 'backward_weight'"
                )
            messages = kinds - passes - {"forward"}
            if messages != needed:
                missing, extra = sorted(needed - messages), sorted(messages - needed)
                what = f"{missing[0]} is missing" if missing else f"{extra[0]} has no peer"
                raise ValueError(f"{where}: {what}; schedules.with_messages puts in what is needed")


_BEFORE = {
    "forward": ("recv_forward",),
    "send_forward": ("forward",),
    "backward": ("forward", "recv_backward"),
    "backward_input": ("forward", "recv_backward"),
    "backward_weight": ("backward_input",),
    "send_backward": ("backward", "backward_input"),
}
"""For each kind, the kinds that come earlier for the same micro-batch and chunk, if the schedule has them."""


def _check_order(rank: int, index: Index, placement: StagePlacement) -> None:
    stages = placement.stages[rank]
    # Chunks whose stage before, or after, is on the same rank too, and hands over without a message.
    previous, following = (
        {chunk: stages.index(stage + step) for chunk, stage in enumerate(stages) if stage + step in stages}
        for step in (-1, 1)
    )
    for (kind, micro_batch, chunk), i in index.items():
        earlier = [(before, micro_batch, chunk) for before in _BEFORE.get(kind, ())]
        if kind == "forward" and chunk in previous:
            earlier.append((kind, micro_batch, previous[chunk]))
        elif kind in ("backward", "backward_input") and chunk in following:
            earlier += [(each, micro_batch, following[chunk]) for each in ("backward", "backward_input")]
        for each in earlier:
            if index.get(each, -1) > i:
                later = Instruction(kind, micro_batch, chunk)
                raise ValueError(f"rank {rank} has {later} before {Instruction(*each)}, which it needs")


def _check_channels(schedule: Schedule, placement: StagePlacement) -> None:
    sent: dict[Channel, list[StageMessage]] = defaultdict(list)
    received: dict[Channel, list[StageMessage]] = defaultdict(list)
    for rank, own in enumerate(schedule):
        for each in own:
            if each.kind not in COMPUTE:
                message = moved(each, rank, placement)
                channels = sent if each.kind.startswith("send") else received
                channels[channel_of(message, placement)].append(message)
    for channel, messages in sent.items():
        for there, here in zip(messages, received[channel], strict=True):
            if there != here:
                raise ValueError(
                    f"rank {channel.source} sends micro-batch {there.micro_batch} of stage {there.stage} and "
                    f"rank {channel.destination} receives micro-batch {here.micro_batch} of stage "
                    f"{here.stage} ({channel.kind}); messages arrive in the order in which they are sent"
                )


def completed_sends(schedule: Schedule) -> list[CompletedSends]:
    """For each rank of a schedule that passes `check`: the sends that each of its receives acknowledges."""
    placement = placement_of(schedule)
    received_at: dict[StageMessage, tuple[int, int]] = {}  # the receiver, and the index of its receive
    for rank, own in enumerate(schedule):
        for index, each in enumerate(own):
            if each.kind.startswith("recv"):
                received_at[moved(each, rank, placement)] = rank, index
    known = [[0] * len(schedule) for _ in schedule]  # the instructions of each rank that a rank knows done
    clocks: dict[StageMessage, list[int]] = {}  # what the sender of a message knew
    open_sends: list[dict[Instruction, tuple[int, int]]] = [{} for _ in schedule]
    found: list[dict[Instruction, list[Instruction]]] = [{} for _ in schedule]
    for rank, each, message in replay(schedule):
        if message is not None and each.kind.startswith("send"):
            clocks[message] = [*known[rank]]
            open_sends[rank][each] = received_at[message]
        elif message is not None:
            known[rank] = [*map(max, known[rank], clocks[message])]
            done = [send for send, (peer, index) in open_sends[rank].items() if known[rank][peer] > index]
            for send in done:
                del open_sends[rank][send]
            found[rank][each] = done
        known[rank][rank] += 1
    return [*found]
