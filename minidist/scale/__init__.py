"""What training costs at a scale, reckoned before anything is built; and where the time of a step goes.

| File | Holds |
|---|---|
| memory/__main__.py | `estimate`, `fits` and `plot`; `python -m minidist.scale.memory` prints what fits |
| memory/estimates.py | the bytes of a layout on each rank |
| memory/state_bytes.py | parameters, gradients and optimizer state |
| memory/parameter_sizes.py | the sizes of a model's parameters, layer by layer |
| memory/saved_activations.py | what the forward pass saves for the backward pass |
| memory/largest_batch.py | the largest batch that fits, and what makes it fit |
| memory/bar_chart.py | the bar chart |
| dry_run/run.py | `dryrun`: a training's code, run as one rank of a layout of any size, alone and without
data |
| dry_run/fake_tensors.py | tensors that hold no data; dry_run/operations.py, dry_run/storage_spans.py: what
is done to them |
| dry_run/fake_world.py | a world whose other ranks are not there; dry_run/peers.py says what they would tell
|
| dry_run/calls.py | what the rank would send, by axis and phase; dry_run/report.py shows it |
| dry_run/models.py | models for it by their shapes; dry_run/arguments.py says what cannot be run dry |
| time/step_time.py | `predict_step`: seconds of a step, part by part |
| time/layer_work.py | what each layer computes and moves |
| time/stages.py | passes, stage by stage, and a pipeline's schedule |
| time/traffic.py | what tensor, context and pipeline parallelism send, over which links |
| time/gradient_exchange.py | what data parallelism and ZeRO send, and the update |
| time/pipeline_time.py | how long a pipeline takes, each rank on a device of its own |
| time/shared_cores.py | a pipeline whose ranks take turns on a few cores |
| time/hardware.py | machines by name, with their sources |
| time/rates.py | what a machine is described by |
| time/measure_machine.py | `this_machine` measures it, by time/rank_timing.py and time/least_squares.py;
time/hardware_file.py keeps it |
| planning/planner.py | `plan`: every layout that fits, by its time; planning/candidates.py lists them,
planning/report.py says it |
| planning/trial.py | layouts tried for real; planning/calibration.py compares many with what was predicted |
| tracing/trace.py | `trace`: what every rank does in a step, as a file for Perfetto and as a picture |
"""
