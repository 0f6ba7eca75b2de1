"""Check a reader's own kernels on random numbers of any size, and score them by what they cost.

| File | Holds |
|---|---|
| problems | ten specifications, their random cases and their pars |
| recorder | runs the reader's file in a process of its own, and notes what it launches |
| verdicts | runs what was noted in the emulator, checks it, and counts what it costs |
| gpu_time | its time on a GPU, if there is one |

`minidist judge FILE` prints the verdicts; docs/ladders/judge.md has the rules.
"""

from .problems import PROBLEMS as PROBLEMS
from .verdicts import Costs as Costs
from .verdicts import Verdict as Verdict
from .verdicts import judge as judge
