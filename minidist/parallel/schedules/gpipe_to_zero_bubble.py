"""The order of passes in GPipe, 1F1B, interleaved 1F1B and zero bubble.

All functions raise ValueError for sizes below 1; only `gpipe` and `interleaved` take several chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

from minidist.parallel.schedules.instructions import Instruction, check_sizes, instruction, only
from minidist.parallel.schedules.whole_schedules import with_messages

ONE_CHUNK = "this schedule has one chunk a rank; take interleaved"


def gpipe(ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Instruction]]:
    """All forward passes, then all backward passes (GPipe). In between, every activation is live.

    With several chunks, all micro-batches go through one chunk before the next chunk begins.
    """
    check_sizes(ranks, micro_batches, chunks)
    passes = [("forward", chunk) for chunk in range(chunks)]
    passes += [("backward", chunk) for chunk in reversed(range(chunks))]
    order = [instruction(kind, i, chunk) for kind, chunk in passes for i in range(micro_batches)]
    return with_messages([order] * ranks)


def one_f_one_b(ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Instruction]]:
    """One forward and one backward pass in turn (1F1B), after a forward pass for each rank that follows.

    The bubble is that of GPipe. But a backward pass frees activations before the next forward pass makes new
    ones, so rank r never holds more than `ranks - r` micro-batches.
    """
    check_sizes(ranks, micro_batches, chunks, 1, ONE_CHUNK)
    order = [(i, 0) for i in range(micro_batches)]
    return with_messages([_alternating(order, order, ranks - 1 - rank) for rank in range(ranks)])


def interleaved(ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Instruction]]:
    """1F1B with several chunks a rank: the pipeline fills and drains by chunks, so chunks divide the bubble.

    Micro-batches go in groups, one micro-batch for each rank: a group passes all of a rank's chunks before
    the next group begins. If the ranks do not divide the micro-batches, this is the schedule of a full last
    group without the passes of those that are missing.
    """
    check_sizes(ranks, micro_batches, chunks)
    if chunks == 1:
        return one_f_one_b(ranks, micro_batches)
    groups = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    forwards = [(i, chunk) for group in groups for chunk in range(chunks) for i in group]
    backwards = [(i, chunk) for group in groups for chunk in reversed(range(chunks)) for i in group]
    warm_ups = [(chunks - 1) * ranks + 2 * (ranks - 1 - rank) for rank in range(ranks)]
    full = [_alternating(forwards, backwards, warm_up) for warm_up in warm_ups]
    return with_messages(only(full, lambda each: each.micro_batch < micro_batches))


def zero_bubble(ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Instruction]]:
    """1F1B with the backward pass in two: no rank waits for the weights' gradients, so they fill the bubble.

    This is ZB-H1: rank r postpones the weights' gradients of r micro-batches, so that it never holds more
    activations than rank 0 does in 1F1B. With times F, I and W of the three passes, I and F at least W, each
    rank waits for (p - 1) (F + I - W), and for (p - 1) (F + I + W) in 1F1B.
    """
    check_sizes(ranks, micro_batches, chunks, 1, ONE_CHUNK)
    compute, passes = [], [(i, 0) for i in range(micro_batches)]
    for rank in range(ranks):
        order: list[Instruction] = []
        for each in _alternating(passes, passes, ranks - 1 - rank):
            if each.kind == "forward":
                order.append(each)
                continue
            order.append(instruction("backward_input", each.micro_batch))
            if each.micro_batch >= rank:
                order.append(instruction("backward_weight", each.micro_batch - rank))
        left = range(max(0, micro_batches - rank), micro_batches)
        compute.append([*order, *(instruction("backward_weight", i) for i in left)])
    return with_messages(compute)


def _alternating(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], warm_up: int
) -> list[Instruction]:
    """`warm_up` forward passes, then one forward and one backward in turn, then the other backward passes."""
    warm_up = min(warm_up, len(forwards))
    order = [instruction("forward", *each) for each in forwards[:warm_up]]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [instruction("forward", *forward), instruction("backward", *backward)]
    return order + [instruction("backward", *each) for each in backwards[len(forwards) - warm_up :]]
