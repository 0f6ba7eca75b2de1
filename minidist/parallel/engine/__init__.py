"""The engine: from a model, an optimizer and a layout to a training step on every rank.

| File | Holds |
|---|---|
| prepare.py, prepare_checks.py | `prepare`: makes an engine; all checks before the model is touched |
| training_step.py | `Engine`: the step |
| evaluation.py, engine_state.py | the rest of `Engine`: evaluation, predictions, loaders; memory and state |
| step_executor.py, staged_passes.py | forward and backward passes through all layers, or through a pipeline |
| rank_model.py | this rank's part of a model, of the batches that are given, and of the loss |
| rehearsal.py | steps beside those of a single process; an error where they differ |
| one_process.py | the step of the single process |
| whole_state.py | the whole state and all rows on one rank |
| step_difference.py | what differs, and the likely cause |
| kept_state.py | an engine's state, and what functions keep, to put back after a trial |
| partition_model.py | how a model is cut: its layers, its matrices, its tokens |
| parameter_placement.py | where a rank's tensors lie in the whole model |
| ema.py | an exponential moving average of the weights that each rank keeps |
| meta_device.py | values for a model that was made without memory |
"""
