"""The engine: from a model, an optimizer and a layout to a training step on every rank.

| File | Holds |
|---|---|
| prepare.py, prepare_checks.py | `prepare`: makes an engine; all checks before the model is touched |
| training_step.py | `Engine`: the step |
| evaluation.py, engine_state.py | the rest of `Engine`: evaluation and predictions; memory and state |
| given_batches.py | the forms in which a caller gives batches; loaders that end at different times |
| objective.py | a loss and its weight, and a check that it is a mean |
| step_executor.py, whole_passes.py | forward and backward passes: through a pipeline, or through all layers |
| rank_model.py | `RankModel`, `RankBatch`: this rank's part of a model and of a batch |
| partition_model.py | how a model is cut: its layers, its matrices, its tokens |
| parameter_placement.py | where a rank's tensors lie in the whole model |
| ema.py | an exponential moving average of the weights that each rank keeps |
| meta_device.py | values for a model that was made without memory |
"""
