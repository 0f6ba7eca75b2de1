"""Pipeline schedules: in which order each rank runs forward and backward passes of the micro-batches.

A schedule is data, a list of instructions for each rank. So it is made, proved, simulated and drawn without a
process, and without torch. ../pipeline/ executes it. ../contract/schedule_kinds.py has a record of each
schedule: how long ranks wait, how many micro-batches' activations they hold, where the stages are.

| File | Holds |
|---|---|
| gpipe_to_zero_bubble.py | `gpipe`, `one_f_one_b`, `interleaved`, `zero_bubble`: their order of passes |
| v_schedules.py | `zero_bubble_v`, `dual_pipe_v`: their micro-batches go down the ranks and up again |
| instructions.py | `Instruction` and `Schedule`, their messages and channels |
| schedule_proof.py | `check`: ranks can execute a schedule; when they know that what they sent has arrived |
| simulation.py | `simulate`: seconds, bubbles and live activations; `plot`: a Gantt chart |
"""

from minidist.parallel.schedules.gpipe_to_zero_bubble import *  # noqa: F403
from minidist.parallel.schedules.gpipe_to_zero_bubble import __all__ as __all__
