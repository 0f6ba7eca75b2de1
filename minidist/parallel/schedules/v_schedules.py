"""Schedules on a V: rank r holds stage r and stage 2 p - 1 - r, so a micro-batch ends where it began.

The loss is on rank 0, and a rank meets each micro-batch twice before its backward pass begins. With the
backward pass in two, for inputs and for weights, p - 1 of 6 m + p - 1 units are idle where all passes take
equal times, and every rank holds as much as rank 0 does in 1F1B.

Sources: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3 (the V), and Qi et al.
2023, "Zero Bubble Pipeline Parallelism", section 6 (ZB-V); DeepSeek-AI 2024, "DeepSeek-V3 Technical Report",
section 3.2.1 (DualPipe; with a V, half of its ranks have the same schedule and no second copy of parameters).
"""

from __future__ import annotations

from minidist.parallel.contract.schedule_kinds import v_shape
from minidist.parallel.schedules.instructions import Instruction, check_sizes, instruction
from minidist.parallel.schedules.whole_schedules import with_messages

INPUT, WEIGHT = "backward_input", "backward_weight"
TWO_CHUNKS = 2, "a V has two chunks a rank; give chunks=2"


def zero_bubble_v(ranks: int, micro_batches: int, chunks: int = 2) -> list[list[Instruction]]:
    """ZB-V: at each unit of time every rank takes the first pass in a list that is ready.

    A forward pass comes first, of the later stage if both are ready, while the rank holds fewer than 2 p of
    them. Then come the gradients of its first stage, for inputs before weights, and then those of its later
    stage. Of all orders of these six passes eight leave p - 1 idle units for every p up to 8 and m from p to
    20; this is one of them.
    """
    check_sizes(ranks, micro_batches, chunks, *TWO_CHUNKS)
    last, most = 2 * ranks - 1, 2 * ranks
    ends: dict[tuple[str, int, int], int] = {}  # when a pass of a stage and a micro-batch is over
    begun = {kind: [0] * (last + 1) for kind in ("forward", INPUT, WEIGHT)}  # micro-batches, by stage
    orders: list[list[Instruction]] = [[] for _ in range(ranks)]
    live, now = [0] * ranks, 0

    def over(kind: str, stage: int, micro_batch: int) -> bool:
        return ends.get((kind, stage, micro_batch), now + 1) <= now

    def ready(kind: str, stage: int, rank: int) -> bool:
        i = begun[kind][stage]
        if i == micro_batches:
            return False
        if kind == "forward":
            return live[rank] < most and (stage == 0 or over(kind, stage - 1, i))
        if kind == INPUT:
            return over("forward", stage, i) and (stage == last or over(kind, stage + 1, i))
        return over(INPUT, stage, i)

    while any(count < micro_batches for count in begun[WEIGHT]):
        for rank, order in enumerate(orders):
            first, second = rank, last - rank
            gradients = [(kind, stage) for stage in (first, second) for kind in (INPUT, WEIGHT)]
            for kind, stage in [("forward", second), ("forward", first), *gradients]:
                if ready(kind, stage, rank):
                    order.append(instruction(kind, begun[kind][stage], int(stage == second)))
                    ends[kind, stage, begun[kind][stage]] = now + 1
                    begun[kind][stage] += 1
                    live[rank] += {"forward": 1, WEIGHT: -1}.get(kind, 0)
                    break
        now += 1
    return with_messages(orders, v_shape(ranks, chunks))


def dual_pipe_v(ranks: int, micro_batches: int, chunks: int = 2) -> list[list[Instruction]]:
    """DualPipeV: forward passes of one chunk in turns with backward passes of the other, to hide messages.

    In the steady state a rank runs F0 B1 F1 B0. That needs 2 p micro-batches; with fewer it is ZB-V.
    """
    check_sizes(ranks, micro_batches, chunks, *TWO_CHUNKS)
    if micro_batches < 2 * ranks:
        return zero_bubble_v(ranks, micro_batches)
    orders = []
    for rank in range(ranks):
        after = ranks - 1 - rank  # ranks that follow on the way down
        order = _Order(micro_batches)
        order.run(2 * after, "F0")
        order.run(rank + 1, "F0", "F1")
        order.run(after, "I1", "W", "F1")
        order.run(micro_batches - 2 * ranks + rank + 1, "F0", "B1", "F1", "B0")
        order.run(after, "B1", "F1", "B0")
        tail = ["B1", "B0"] * (rank + 1)
        order.run(1, *tail[: rank + 1], *(each.replace("B", "I") for each in tail[rank + 1 :]))
        order.run(after, "W", "I0")
        order.run(2 * micro_batches, "W")
        orders.append(order.passes)
    return with_messages(orders, v_shape(ranks, chunks))


class _Order:
    """One rank's passes. A pass that has no micro-batch left is skipped."""

    def __init__(self, micro_batches: int) -> None:
        self.passes: list[Instruction] = []
        self._forwards, self._backwards = [0, 0], [0, 0]  # micro-batches, by chunk
        self._micro_batches = micro_batches
        self._postponed: list[Instruction] = []  # weight gradients

    def run(self, times: int, *names: str) -> None:
        """Add passes `times` times: F, I or B of a chunk; or W, the oldest postponed weight gradient."""
        for name in names * max(0, times):
            kind, chunk = name[0], int(name[1:] or 0)
            if kind == "W":
                self.passes += self._postponed[:1]
                del self._postponed[:1]
            elif kind == "F" and self._forwards[chunk] < self._micro_batches:
                self.passes.append(instruction("forward", self._forwards[chunk], chunk))
                self._forwards[chunk] += 1
            elif kind != "F" and self._backwards[chunk] < self._forwards[chunk]:
                both = [instruction(each, self._backwards[chunk], chunk) for each in (INPUT, WEIGHT)]
                self._backwards[chunk] += 1
                self.passes += both if kind == "B" else both[:1]
                self._postponed += [] if kind == "B" else both[1:]
