"""What training costs at a scale, reckoned before anything is built; and where the time of a step goes.

| File | Holds |
|---|---|
| memory.py | `estimate`, `fits` and `plot`; `python -m minidist.scale.memory` prints what fits |
| estimates.py | the bytes of a layout on each rank |
| states.py | parameters, gradients and optimizer state |
| tensors.py | the sizes of a model's parameters, layer by layer |
| saved.py | what the forward pass saves for the backward pass |
| fitting.py | the largest batch that fits, and what makes it fit |
| memory_plot.py | the bar chart |
| dryrun.py | `dryrun`: a training's code, run as one rank of a layout of any size, alone and without data |
| dry_tensors.py | tensors that hold no data; dry_operations.py, dry_spans.py: what is done to them |
| dry_world.py | a world whose other ranks are not there; dry_peers.py says what they would tell |
| dry_calls.py | what the rank would send, by axis and phase; dry_report.py shows it |
| dry_models.py | models for it by their shapes; dry_arguments.py says what cannot be run dry |
| step_time.py | `predict_step`: seconds of a step, part by part |
| work.py | what each layer computes and moves |
| stages.py | passes, stage by stage, and a pipeline's schedule |
| traffic.py | what tensor, context and pipeline parallelism send, over which links |
| gradients.py | what data parallelism and ZeRO send, and the update |
| pipelined.py | how long a pipeline takes, each rank on a device of its own |
| shared_cores.py | a pipeline whose ranks take turns on a few cores |
| hardware.py | machines by name, with their sources |
| rates.py | what a machine is described by |
| measuring.py | `this_machine` measures it, by timing.py and solving.py; hardware_file.py keeps it |
| planner.py | `plan`: every layout that fits, by its time; candidates.py lists them, plan_words.py says it |
| trial.py | layouts tried for real; calibration.py compares many with what was predicted |
| trace.py | `trace`: what every rank does in a step, as a file for Perfetto and as a picture |
"""
