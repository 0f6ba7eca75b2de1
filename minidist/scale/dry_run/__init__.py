"""The training's own code, run as one rank of a layout of any size, without other ranks or data.

It counts exactly what the rank sends and holds, on one core and in little memory.

| File | Holds |
|---|---|
| run.py | `dryrun` |
| arguments.py | checks of its arguments; the kinds of ranks of a layout |
| models.py | models without data |
| own_model.py | a model of your own: its sizes, and the passes of two small batches, measured |
| own_prediction.py | memory and time of such a model in a layout; the same call for transformers |
| fake_tensors.py | tensors without data |
| operations.py | what torch's schemas say about operations |
| storage.py | addresses without memory; byte ranges without data |
| fake_world.py | a process group that answers for the other ranks |
| peers.py | what other ranks send, where they differ |
| calls.py | calls with their axis and phase |
| report.py | tables and JSON |
"""
