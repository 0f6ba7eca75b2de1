"""Pipeline parallelism: each rank holds some of the layers, and micro-batches flow through the ranks.

A schedule is data: it is made, proved, simulated and drawn without a process, and then executed by
`Pipeline`.

| File | Holds |
|---|---|
| schedules.py | the order of passes in GPipe, 1F1B, interleaved 1F1B and zero bubble |
| v_schedules.py | ZB-V and DualPipeV, whose micro-batches go down the ranks and up again |
| instructions.py | `Instruction` and `Schedule`, their messages and channels |
| schedule_proof.py | `check`: ranks can execute a schedule; when they know that what they sent has arrived |
| simulation.py | `simulate`: seconds, bubbles and live activations; `plot`: a Gantt chart |
| execution.py | `Pipeline`: executes a schedule, pass by pass |
| pipeline_checks.py | checks of a pipeline's arguments |
| stage_messages.py | messages between stages, of one tensor or several; the loss to all |
| split_backward.py | a backward pass in two parts |
| tied_parameters.py | parameters that several stages share |
| balanced_cut.py | where to cut a chain of layers with given weights; without torch |
| layer_by_layer.py | `LayerByLayer`: one batch at a time; `cut`: where to cut a model |
| layer_chain.py | the list of layers at which to cut a model; whether the model is nothing else |
| layer_trace.py | how any model's forward pass calls the layers of a list |
| model_stage.py | a stage that runs the model's forward pass from its first layer to its last |
"""
