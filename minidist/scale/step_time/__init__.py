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
| prediction.py | `predict_step`: all parts of a step, stage by stage |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist._lazy import lazy

if TYPE_CHECKING:
    from minidist.scale.step_time.prediction import StepTime as StepTime
    from minidist.scale.step_time.prediction import predict_step as predict_step

__getattr__, __dir__, __all__ = lazy(__name__)
