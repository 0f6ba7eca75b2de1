"""The engine: from a model, an optimizer and a layout to a training step on every rank.

| File | Holds |
|---|---|
| prepare.py, prepare_checks.py | `prepare`: makes an engine; all checks before the model is touched |
| training_step.py | `Engine`: the step, and what users ask of an engine |
| step_executor.py | forward and backward passes through all layers, and the loss |
| staged_passes.py | the same through a pipeline's stages |
| evaluation.py | metrics, predictions, and loaders that end at different times |
| rehearsal.py | steps beside those of a single process; an error where they differ |
| one_process.py | the step of the single process |
| same_rows.py | an error where ranks that split the model were given different rows |
| whole_state.py | an engine's state, to put back after a trial; the whole state and all rows on one rank |
| step_difference.py | what differs, and the likely cause |
| partition_model.py | `RankModel`: how a model is cut: its layers, its matrices, its tokens |
| tensor_map.py | `TensorMap`: where a rank's tensors lie in the whole model |
| ema.py | an exponential moving average of the weights that each rank keeps |
| meta_device.py | values for a model that was made without memory |
"""
