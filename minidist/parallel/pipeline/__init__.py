"""Pipeline parallelism: each rank holds some of the layers, and micro-batches flow through the ranks.

Who runs which pass when is a schedule (../schedules/); `Pipeline` executes it.

| File | Holds |
|---|---|
| execution.py | `Pipeline`: a rank's stages, and batches that go through them |
| schedule_run.py | `ScheduleRun`: one run of a schedule, instruction by instruction |
| pipeline_checks.py | checks of a pipeline's arguments |
| stage_messages.py | messages between stages, of one tensor or several; the loss to all |
| split_backward.py | a backward pass in two parts |
| tied_parameters.py | parameters that several stages share |
| layer_chain.py | the list of layers at which to cut a model; whether the model is nothing else |
| layer_trace.py | how any model's forward pass calls the layers of a list |
| model_stage.py | a stage that runs the model's forward pass from its first layer to its last |
"""
