"""Run all machines of a launch: the order of the blocks, and what happens when blocks wait for each other.

Each machine holds some blocks of the grid. Machines run one after another, since a kernel must be right for
any order of its blocks. But blocks that are on a GPU at the same time may wait for each other, through flags
in global memory or at a barrier of the whole grid. So a machine that cannot go on is set aside and the next
one starts. Waiting machines try again when memory has changed. The run ends in a fault when more blocks wait
than a GPU holds at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..machine.launch import MULTIPROCESSORS, Launch
from ..ptx.fault import Fault
from .lane_scheduler import LaneScheduler


def run_grid(launch: Launch, machines: Iterator[LaneScheduler]) -> None:
    """Run all machines of a launch to their end. Raises Fault, also for blocks that wait for ever."""
    waiting: list[LaneScheduler] = []
    for scheduler in machines:
        waiting = _retry(launch, waiting)
        if scheduler.run():
            continue
        waiting.append(scheduler)
        held = sum(one.machine.blocks for one in waiting)
        if held > launch.blocks_at_once:
            _give_up(
                waiting[0],
                f"; they may wait for blocks that cannot start: a GPU of {MULTIPROCESSORS} multiprocessors "
                f"holds {launch.blocks_at_once} blocks of this kernel at a time, and the grid has "
                f"{launch.blocks}",
            )
    if waiting := _retry(launch, waiting):
        _give_up(waiting[0], "")


def _retry(launch: Launch, waiting: list[LaneScheduler]) -> list[LaneScheduler]:
    """Run waiting machines again as long as memory changes; return those that still wait."""
    while any(scheduler.seen_changes != launch.memory.changes for scheduler in waiting):
        waiting = [scheduler for scheduler in waiting if not scheduler.run()]
    return waiting


def _give_up(scheduler: LaneScheduler, more: str) -> None:
    verdict = scheduler.verdict
    assert verdict is not None
    raise Fault(verdict.kind, verdict.message + more, verdict.where, verdict.instruction)
