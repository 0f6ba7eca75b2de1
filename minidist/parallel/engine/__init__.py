"""The engine: from a model, an optimizer and a layout to a training step on every rank.

| File | Holds |
|---|---|
| prepare.py, prepare_checks.py | `prepare`: makes an engine; all checks before the model is touched |
| training_step.py | `Engine`: the step, evaluation, memory and state |
| step_executor.py | forward and backward passes: through the whole model, or through a pipeline |
| partition_model.py | this rank's part of a model: its layers, its parts of matrices, its tokens |
| parameter_placement.py | where a rank's tensors lie in the whole model |
| ema.py | an exponential moving average of the weights that each rank keeps |
| meta_device.py | values for a model that was made without memory |
"""
