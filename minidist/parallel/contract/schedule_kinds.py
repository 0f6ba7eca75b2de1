"""The pipeline schedules that a layout can name: one record for each, with all that is true of it.

`Layout`, `Pipeline`, the planner, the models of memory and time and the benchmarks read this record, so a new
schedule is told to this file alone. The functions that make the instruction lists are in
pipeline/schedules.py; the record names them, because this package lies below the pipeline.
"""

from __future__ import annotations

import pkgutil
from typing import Any, NamedTuple

from minidist._names import unknown


class ScheduleKind(NamedTuple):
    """The properties of a schedule. A call with ranks, micro-batches and chunks makes the instructions."""

    title: str  # in reports
    made_by: str  # "module:function", from ranks, micro-batches and chunks to instruction lists
    chunked: bool = False  # whether a layout gives each rank two or more chunks, or exactly one
    splits_backward: bool = False  # whether input and weight gradients are computed in separate passes
    planned: bool = True  # whether the planner tries it

    @property
    def least_chunks(self) -> int:
        """The smallest number of chunks that a layout takes with it."""
        return 2 if self.chunked else 1

    @property
    def allows_recompute(self) -> bool:
        """Whether layers may recompute activations: these are kept for one backward pass, not for two."""
        return not self.splits_backward

    def __call__(self, ranks: int, micro_batches: int, chunks: int = 1) -> Any:
        """Make the instruction list of each rank; ValueError for sizes that the schedule does not take."""
        return pkgutil.resolve_name(self.made_by)(ranks, micro_batches, chunks)


_MODULE = "minidist.parallel.pipeline.schedules"
DEFAULT_SCHEDULE = "1f1b"
SCHEDULES = {
    "gpipe": ScheduleKind("GPipe", f"{_MODULE}:gpipe", planned=False),  # 1F1B is as fast, and holds less
    "1f1b": ScheduleKind("1F1B", f"{_MODULE}:one_f_one_b"),
    "zero_bubble": ScheduleKind("zero bubble", f"{_MODULE}:zero_bubble", splits_backward=True),
    "interleaved": ScheduleKind("interleaved 1F1B", f"{_MODULE}:interleaved", chunked=True),
}
"""By name, as `Pipeline` and `Layout` take it. In all of them stage s is chunk s // p of rank s % p."""


def schedule_kind(name: str) -> ScheduleKind:
    """The record of a schedule; ValueError for an unknown name, with the nearest known one."""
    if name not in [*SCHEDULES]:  # a list, since a name may be of any type, also one without a hash
        raise unknown("schedule", name, SCHEDULES)
    return SCHEDULES[name]
