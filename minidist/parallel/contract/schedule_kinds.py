"""The pipeline schedules that a layout can name: one record for each, with all that is true of it.

To add a schedule, write the function that makes it (in schedules/) and its record here. `Layout`, `Pipeline`,
the engine, the planner, the models of memory and time, the benchmarks, the docs' tables, the playground and
the tests read the record. It names its function by text, because this package lies below schedules/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from minidist._names import unknown


class StagePlacement:
    """Which stages of a model each rank of a pipeline holds. Stages count in the order of the layers.

    >>> StagePlacement([[0, 3], [1, 2]])  # a V: rank 0 holds the first and the last of four stages

    stages: for each rank the stages of its chunks, in the order of the chunks. Raises ValueError if a stage
    is missing or is there twice, or if ranks differ in their numbers of chunks.
    """

    def __init__(self, stages: Sequence[Sequence[int]]) -> None:
        self.stages = tuple(map(tuple, stages))  # by rank and chunk
        held = sorted(stage for own in self.stages for stage in own)
        if held != [*range(len(held))] or len({*map(len, self.stages)}) != 1:
            raise ValueError(
                f"the ranks hold the stages {self.stages}; give each rank as many, and each stage from 0 on "
                "to one rank, such as [[0, 2], [1, 3]]"
            )

    def __repr__(self) -> str:
        return f"StagePlacement({self.stages})"

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank that holds each stage."""
        held = {stage: rank for rank, own in enumerate(self.stages) for stage in own}
        return tuple(held[stage] for stage in range(len(held)))


@lru_cache(maxsize=256)
def round_robin(ranks: int, chunks: int) -> StagePlacement:
    """Stage s is chunk s // ranks of rank s % ranks: a micro-batch goes round the ranks once for each chunk.

    Source: Narayanan et al. 2021, section 2.2.
    """
    return StagePlacement([range(rank, ranks * chunks, ranks) for rank in range(ranks)])


@lru_cache(maxsize=256)
def v_shape(ranks: int, chunks: int) -> StagePlacement:
    """Rank r has stages r and 2 p - 1 - r: a micro-batch goes down the ranks and up again.

    Source: Qi et al. 2024, section 3.
    """
    return StagePlacement([(rank, 2 * ranks - 1 - rank) for rank in range(ranks)])


class ScheduleKind(NamedTuple):
    """The properties of a schedule.

    Formulas are Python expressions of p ranks, m micro-batches, v chunks a rank and the rank r, for stages
    and passes (forward, backward of inputs, backward of weights) that take equal times, where p divides m.
    """

    title: str  # in reports and tables
    made_by: str  # "module:function", from ranks, micro-batches and chunks to lists of passes or instructions
    chunks: tuple[int, int | None] = (1, 1)  # the fewest and the most a rank that a layout takes; None: any
    placement: Callable[[int, int], StagePlacement] = round_robin  # from ranks and chunks
    splits_backward: bool = False  # whether input and weight gradients are computed in separate passes
    planned: bool = True  # whether the planner tries it
    bubble: str = ""  # formula: the share of time in which ranks wait
    live: str = ""  # formula: the most passes of rank r whose activations are live at a time
    torch_name: str = ""  # the class in torch.distributed.pipelining, which the benchmarks run beside it

    @property
    def least_chunks(self) -> int:
        """The smallest number of chunks that a layout takes with it."""
        return self.chunks[0]

    @property
    def chunked(self) -> bool:
        """Whether a layout gives each rank several chunks."""
        return self.chunks[0] > 1

    @property
    def allows_recompute(self) -> bool:
        """Whether layers may recompute activations: these are kept for one backward pass, not for two."""
        return not self.splits_backward

    def takes_chunks(self, chunks: int) -> bool:
        """Whether a layout may give each rank so many chunks."""
        least, most = self.chunks
        return least <= chunks and (most is None or chunks <= most)


_MODULE = "minidist.parallel.schedules.gpipe_to_zero_bubble"
_V_MODULE = "minidist.parallel.schedules.v_schedules"
DEFAULT_SCHEDULE = "1f1b"
SCHEDULES = {
    "gpipe": ScheduleKind(  # Huang et al. 2019, section 2.3
        "GPipe",
        f"{_MODULE}:gpipe",
        planned=False,  # 1F1B is as fast, and holds less
        bubble="(p - 1) / (m + p - 1)",
        live="m",
        torch_name="ScheduleGPipe",
    ),
    "1f1b": ScheduleKind(  # Narayanan et al. 2019, section 3.2
        "1F1B",
        f"{_MODULE}:one_f_one_b",
        bubble="(p - 1) / (m + p - 1)",
        live="min(m, p - r)",
        torch_name="Schedule1F1B",
    ),
    "zero_bubble": ScheduleKind(  # Qi et al. 2023, ZB-H1
        "zero bubble",
        f"{_MODULE}:zero_bubble",
        splits_backward=True,
        bubble="(p - 1) / (3 * m + p - 1)",
        live="min(m, p)",
        torch_name="ScheduleInterleavedZeroBubble",
    ),
    "interleaved": ScheduleKind(  # Narayanan et al. 2021, section 2.2
        "interleaved",
        f"{_MODULE}:interleaved",
        chunks=(2, None),
        bubble="(p - 1) / (v * m + p - 1)",
        live="min(v * m, (v - 1) * p + 2 * (p - r) - 1)",
        torch_name="ScheduleInterleaved1F1B",
    ),
    "zero_bubble_v": ScheduleKind(  # Qi et al. 2023, ZB-V
        "zero bubble, V",
        f"{_V_MODULE}:zero_bubble_v",
        chunks=(2, 2),
        placement=v_shape,
        splits_backward=True,
        bubble="(p - 1) / (6 * m + p - 1)",
        live="min(2 * m, 2 * p)",
        torch_name="ScheduleZBVZeroBubble",
    ),
    "dual_pipe_v": ScheduleKind(  # DeepSeek-AI 2024, with half of the ranks
        "DualPipeV",
        f"{_V_MODULE}:dual_pipe_v",
        chunks=(2, 2),
        placement=v_shape,
        splits_backward=True,
        planned=False,  # the V with zero bubble is as fast, and holds less
        bubble="(p - 1) / (6 * m + p - 1)",
        live="min(2 * m, 2 * p + 1)",
        torch_name="ScheduleDualPipeV",
    ),
}
"""By name, as `Pipeline` and `Layout` take it."""


def schedule_kind(name: str) -> ScheduleKind:
    """The record of a schedule; ValueError for an unknown name, with the nearest known one."""
    if name not in [*SCHEDULES]:  # a list, since a name may be of any type, also one without a hash
        raise unknown("schedule", name, SCHEDULES)
    return SCHEDULES[name]


def chunked_kinds() -> str:
    """The schedules with several chunks a rank, for an error: "2 or more with the schedule interleaved"."""
    found = []
    for least, most in dict.fromkeys(kind.chunks for kind in SCHEDULES.values() if kind.chunked):
        names = " or ".join(name for name, kind in SCHEDULES.items() if kind.chunks == (least, most))
        more = " or more" if most is None else f" to {most}" if most > least else ""
        found.append(f"{least}{more} with the schedule {names}")
    return ", ".join(found)
