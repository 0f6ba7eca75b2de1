"""Which layout to train a model with: all candidates, ranked by predicted time, and trials of the best.

Predictions combine `memory` and `time`; trials and calibration compare them with real steps.

| File | Holds |
|---|---|
| candidates.py | layouts of a number of ranks that prepare takes |
| planner.py | `plan`: those that fit, ranked |
| report.py | a plan in sentences, a table and JSON |
| trial.py | real steps of several layouts on this machine |
| calibration.py | a command that compares many predictions with real steps |
"""
