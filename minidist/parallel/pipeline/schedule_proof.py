"""A proof, without a process, that a schedule is complete, in order and free from deadlock.

Each rank's list is checked alone first, then the order of the messages on each channel; at last the whole is
executed once by `replay`, whose rules are those of `Pipeline`. (If sends waited for their receivers, which
`Pipeline`'s do not, 1F1B would hang: its neighbours send to each other at the same time.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from minidist.parallel.pipeline.instructions import (
    COMPUTE,
    Instruction,
    Schedule,
    StageMessage,
    moved,
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
    for rank, own in enumerate(schedule):
        index = {(each.kind, each.micro_batch, each.chunk): i for i, each in enumerate(own)}
        if len(index) < len(own):
            twice = next(each for each in own if own.count(each) > 1)
            raise ValueError(
                f"rank {rank} has {twice} {own.count(twice)} times; each instruction is there once"
            )
        _check_complete(rank, index, ranks, found_micro_batches, found_chunks)
        _check_order(rank, index, ranks, found_chunks)
    _check_channels(schedule)


Index = Mapping[tuple[str, int, int], int]
"""At which place of its rank's list the instruction of a kind, micro-batch and chunk stands."""


def _check_complete(rank: int, index: Index, ranks: int, micro_batches: int, chunks: int) -> None:
    found: dict[tuple[int, int], set[str]] = defaultdict(set)
    for kind, micro_batch, chunk in index:
        found[micro_batch, chunk].add(kind)
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


def _check_order(rank: int, index: Index, ranks: int, chunks: int) -> None:
    for (kind, micro_batch, chunk), i in index.items():
        earlier = [(before, micro_batch, chunk) for before in _BEFORE.get(kind, ())]
        if ranks == 1:  # the next stage is the rank's own next chunk
            if kind == "forward":
                earlier.append((kind, micro_batch, chunk - 1))
            elif kind in ("backward", "backward_input") and chunk < chunks - 1:
                earlier += [(before, micro_batch, chunk + 1) for before in ("backward", "backward_input")]
        for each in earlier:
            if index.get(each, -1) > i:
                later = Instruction(kind, micro_batch, chunk)
                raise ValueError(f"rank {rank} has {later} before {Instruction(*each)}, which it needs")


def _check_channels(schedule: Schedule) -> None:
    ranks = len(schedule)
    # A channel leads over the border behind a rank, forward or backward.
    sent: dict[tuple[str, int], list[StageMessage]] = defaultdict(list)
    received: dict[tuple[str, int], list[StageMessage]] = defaultdict(list)
    for rank, own in enumerate(schedule):
        for each in own:
            if each.kind not in COMPUTE:
                message = moved(each, rank, ranks)
                channels = sent if each.kind.startswith("send") else received
                channels[message.kind, message.stage % ranks].append(message)
    for (kind, border), messages in sent.items():
        for there, here in zip(messages, received[kind, border], strict=True):
            if there != here:
                ends = border, (border + 1) % ranks
                source, destination = ends if kind == "forward" else ends[::-1]
                raise ValueError(
                    f"rank {source} sends micro-batch {there.micro_batch} of stage {there.stage} and "
                    f"rank {destination} receives micro-batch {here.micro_batch} of stage "
                    f"{here.stage} ({kind}); messages arrive in the order in which they are sent"
                )
