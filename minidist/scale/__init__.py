"""Predict the cost of training at any scale, before anything is built; and show where a step's time goes.

Each folder's `__init__.py` lists its files. A folder imports only from those above it in the table.

| Folder | Holds |
|---|---|
| memory/ | `estimate`, `fits`: bytes on each rank, from formulas |
| step_time/ | `predict_step`: seconds of a step, part by part; `this_machine` measures the rates |
| dryrun/ | `dryrun`: the training's own code run as one rank of a layout of any size |
| planner/ | `plan`: every layout that fits, ranked by its predicted time; trials of the best |
| trace/ | `trace`: what every rank does in a step, for Perfetto and as a picture |
"""
