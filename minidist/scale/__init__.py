"""Predict the cost of training at any scale, before anything is built; and show where a step's time goes.

Each folder's `__init__.py` lists its files. A folder imports only from those above it in the table.

| Folder or file | Holds |
|---|---|
| memory/ | `estimate`, `fits`: bytes on each rank, from formulas |
| time/ | `predict_step`: seconds of a step, part by part; `this_machine` measures the rates |
| dry_run/ | `dryrun`: the training's own code run as one rank of a layout of any size |
| planning/ | `plan`: every layout that fits, ranked by its predicted time; trials of the best |
| tracing/ | `trace`: what every rank does in a step, for Perfetto and as a picture |
| dryrun.py, planner.py, step_time.py, trace.py | the public import paths of these functions |
"""
