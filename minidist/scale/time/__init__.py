"""Seconds of a training step, predicted from a model's shape, a layout and a machine.

`predict_step` adds up computation, messages, pipeline bubble, gradient exchange and update.

| File | Holds |
|---|---|
| layer_work.py | operations, bytes and calls of each layer |
| traffic.py | seconds of messages, by axis |
| gradient_exchange.py | seconds of the gradient exchange and the update |
| pipeline_time.py | seconds of a pipeline's schedule |
| measure_machine.py | `this_machine`: what ranks time here, and the rates that follow |
| hardware.py, machines.json | a machine; machines by name, with the sources of their figures |
| step_stages.py | all parts of a step, stage by stage |
| step_time.py | `predict_step`; checks, and what it assumes |
"""
