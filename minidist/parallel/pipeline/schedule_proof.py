"""A proof, without a process, that a schedule is complete, in order and free from deadlock.

Each rank's list is checked alone first, then the order of the messages on each channel; at last the whole is
executed once by `replay`, whose rules are those of `Pipeline`. (If sends waited for their receivers, which
`Pipeline`'s do not, 1F1B would hang: its neighbours send to each other at the same time.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from minidist.parallel.pipeline.instructions import (
    Channel,
    Instruction,
    Schedule,
    StageMessage,
    message_of,
    require_schedule,
    sizes,
    stage_of,
)
from minidist.parallel.pipeline.replay import replay


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
    for rank, own in enumerate(schedule):
        _check_complete(rank, own, ranks, found_micro_batches, found_chunks)
        _check_order(rank, own, ranks, found_chunks)
    _check_channels(schedule)
    for _ in replay(schedule):
        pass  # raises Deadlock where no rank can go on


def _check_complete(
    rank: int, own: Sequence[Instruction], ranks: int, micro_batches: int, chunks: int
) -> None:
    counts = Counter(own)
    twice = next((each for each, count in counts.items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"rank {rank} has {twice} {counts[twice]} times; each instruction is there once")
    found: dict[tuple[int, int], set[str]] = defaultdict(set)
    for each in own:
        found[each.micro_batch, each.chunk].add(each.kind)
    for chunk in range(chunks):
        for micro_batch in range(micro_batches):
            kinds = found[micro_batch, chunk]
            where = f"rank {rank}, micro-batch {micro_batch}, chunk {chunk}"
            passes = kinds & {"backward", "backward_input", "backward_weight"}
            if "forward" not in kinds:
                raise ValueError(f"{where}: there is no forward pass")
            if passes not in ({"backward"}, {"backward_input", "backward_weight"}):
                raise ValueError(
                    f"{where}: the backward pass is {sorted(passes)}; it is either 'backward' or both "
                    "'backward_input' and 'backward_weight'"
                )
            needed = _messages_needed(stage_of(rank, chunk, ranks), ranks, chunks)
            if kinds - passes - {"forward"} != needed:
                missing, extra = sorted(needed - kinds), sorted(kinds - passes - {"forward"} - needed)
                what = f"{missing[0]} is missing" if missing else f"{extra[0]} has no peer"
                raise ValueError(f"{where}: {what}; schedules.with_messages puts in what is needed")


def _messages_needed(stage: int, ranks: int, chunks: int) -> set[str]:
    if ranks == 1:
        return set()  # a stage hands over to the next one on the same rank
    first = {"recv_forward", "send_backward"} if stage > 0 else set()
    return first | ({"send_forward", "recv_backward"} if stage < ranks * chunks - 1 else set())


_BEFORE = {
    "forward": ("recv_forward",),
    "send_forward": ("forward",),
    "backward": ("forward", "recv_backward"),
    "backward_input": ("forward", "recv_backward"),
    "backward_weight": ("backward_input",),
    "send_backward": ("backward", "backward_input"),
}
"""For each kind, the kinds that come earlier for the same micro-batch and chunk, if the schedule has them."""


def _check_order(rank: int, own: Sequence[Instruction], ranks: int, chunks: int) -> None:
    index = {each: i for i, each in enumerate(own)}

    def require(earlier: Instruction, later: Instruction) -> None:
        if earlier in index and index[earlier] > index[later]:
            raise ValueError(f"rank {rank} has {later} before {earlier}, which it needs")

    for each in own:
        for kind in _BEFORE.get(each.kind, ()):
            require(Instruction(kind, each.micro_batch, each.chunk), each)
        if ranks > 1:
            continue
        # With one rank, the next stage is the rank's own next chunk.
        if each.kind == "forward" and each.chunk:
            require(Instruction("forward", each.micro_batch, each.chunk - 1), each)
        if each.kind in ("backward", "backward_input") and each.chunk < chunks - 1:
            for kind in ("backward", "backward_input"):
                require(Instruction(kind, each.micro_batch, each.chunk + 1), each)


def _check_channels(schedule: Schedule) -> None:
    sent: dict[Channel, list[StageMessage]] = defaultdict(list)
    received: dict[Channel, list[StageMessage]] = defaultdict(list)
    for rank, own in enumerate(schedule):
        for each in own:
            if not each.computes:
                channel, message = message_of(each, rank, len(schedule))
                (sent if each.kind.startswith("send") else received)[channel].append(message)
    for channel, messages in sent.items():
        for there, here in zip(messages, received[channel], strict=True):
            if there != here:
                raise ValueError(
                    f"rank {channel.source} sends micro-batch {there.micro_batch} of stage {there.stage} and "
                    f"rank {channel.destination} receives micro-batch {here.micro_batch} of stage "
                    f"{here.stage} ({channel.kind}); messages arrive in the order in which they are sent"
                )
