"""Which layout to train a model with: all candidates, ranked by predicted time, and trials of the best.

Predictions combine `memory/` and `step_time/`; trials compare them with real steps, and so does the suite
benchmarks/bench_predictions.py for many layouts.

| File | Holds |
|---|---|
| candidates.py | layouts of a number of ranks that prepare takes, and whether they fit in the memory |
| ranking.py | `plan`: those that fit, ranked |
| plan_report.py | a plan in sentences, a table and JSON |
| trial.py | real steps of several layouts on this machine |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist._lazy import lazy

if TYPE_CHECKING:
    from minidist.scale.planner.ranking import Plan as Plan
    from minidist.scale.planner.ranking import plan as plan

__getattr__, __dir__, __all__ = lazy(__name__)
