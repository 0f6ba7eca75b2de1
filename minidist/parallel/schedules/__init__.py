"""Pipeline schedules: in which order each rank runs forward and backward passes of the micro-batches.

A schedule is data, a list of instructions for each rank. So it is made, proved, simulated and drawn without a
process, and without torch. ../pipeline/ executes it. ../contract/schedule_kinds.py has a record of each
schedule: how long ranks wait, how many micro-batches' activations they hold, where the stages are.

| File | Holds |
|---|---|
| gpipe_to_zero_bubble.py | `gpipe`, `one_f_one_b`, `interleaved`, `zero_bubble`: their order of passes |
| v_schedules.py | `zero_bubble_v`, `dual_pipe_v`: their micro-batches go down the ranks and up again |
| whole_schedules.py | `with_messages`: from passes to a schedule; `by_name`, `forward_only` |
| instructions.py | `Instruction` and `Schedule`, their messages and channels |
| schedule_proof.py | `check`: ranks can execute a schedule; when they know that what they sent has arrived |
| simulation.py | `simulate`: seconds, bubbles and live activations; `plot`: a Gantt chart |
"""

from minidist.parallel.contract.schedule_kinds import SCHEDULES, StagePlacement
from minidist.parallel.schedules.gpipe_to_zero_bubble import gpipe, interleaved, one_f_one_b, zero_bubble
from minidist.parallel.schedules.instructions import Instruction, Schedule
from minidist.parallel.schedules.schedule_proof import check
from minidist.parallel.schedules.simulation import Event, Simulation, plot, simulate
from minidist.parallel.schedules.v_schedules import dual_pipe_v, zero_bubble_v
from minidist.parallel.schedules.whole_schedules import by_name, forward_only, with_messages

__all__ = [
    "SCHEDULES",
    "Event",
    "Instruction",
    "Schedule",
    "Simulation",
    "StagePlacement",
    "by_name",
    "check",
    "dual_pipe_v",
    "forward_only",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "plot",
    "simulate",
    "with_messages",
    "zero_bubble",
    "zero_bubble_v",
]
